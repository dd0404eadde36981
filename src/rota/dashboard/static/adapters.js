// The table of adapters shows each adapter's requests and why they wait, and may load and unload adapters.

import { colour } from "./colours.js";
import { find, make, write } from "./dom.js";
import { count, isOn, pair, seconds } from "./format.js";
import { post } from "./live.js";

const CELLS = ["name", "where", "load", "waiting", "running", "parked", "longest", "ttft", "rate", "why", "action"];
const LABELS = { waiting: "waiting", running: "running", parked: "parked", longest: "longest wait", ttft: "first token", rate: "tokens/s" };
const PLACES = { host: "host memory", reading: "being read", disk: "on disk", source: "at its source" };
const CONFIRM_MS = 4000;

export class Adapters {
  constructor() {
    this.rows = new Map();
    this.body = find("adapters").tBodies[0];
    this.form = find("load");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      const { lora_name, lora_path, pinned } = this.form.elements;
      const asked = { lora_name: lora_name.value.trim(), lora_path: lora_path.value.trim(), pinned: pinned.checked };
      this.act("load_lora_adapter", asked, `Loading ${asked.lora_name} …`, `${asked.lora_name} is loaded.`);
    });
  }

  show(frame) {
    this.form.hidden = !frame.may_load;
    const most = Math.max(1, ...frame.adapters.map((row) => row.running + row.parked + row.waiting));
    const known = new Set(frame.adapters.map((row) => row.id));
    for (const [id, row] of this.rows) {
      if (!known.has(id)) {
        row.element.remove();
        this.rows.delete(id);
      }
    }
    for (const row of frame.adapters) this.showRow(this.rowOf(row), row, frame, most);
    const more = frame.unlisted ? ` · ${count(frame.unlisted)} more without requests` : "";
    write(find("adapters-note"), `${count(frame.adapters.length - 1)} and the base model${more}`);
  }

  rowOf({ id }) {
    if (this.rows.has(id)) return this.rows.get(id);
    const row = { element: make("tr") };
    for (const cell of CELLS) {
      row[cell] = make("td", `${cell}${cell in LABELS ? " number" : ""}`);
      if (cell in LABELS) row[cell].dataset.label = LABELS[cell];
      row.element.append(row[cell]);
    }
    row.swatch = make("i", "swatch");
    row.label = make("b");
    row.name.append(row.swatch, row.label);
    row.bars = ["running", "parked", "waiting"].map((kind) => make("i", kind));
    row.load.append(make("div", "bars", ...row.bars));
    row.element.dataset.adapter = id;
    const next = [...this.rows.keys()].filter((other) => other > id).sort((a, b) => a - b)[0];
    this.body.insertBefore(row.element, next === undefined ? null : this.rows.get(next).element);
    this.rows.set(id, row);
    return row;
  }

  showRow(row, one, frame, most) {
    row.swatch.style.background = colour(one.id);
    write(row.label, one.version > 1 || !one.is_current ? `${one.name}@${one.version}` : one.name);
    row.label.title = one.is_current ? one.name : `${one.name} does not mean this version now`;
    write(row.where, whereIs(one, frame));
    [one.running, one.parked, one.waiting].forEach((number, index) => {
      row.bars[index].style.width = `${(100 * number) / most}%`;
      row.bars[index].style.background = colour(one.id);
    });
    write(row.waiting, count(one.waiting));
    write(row.running, count(one.running));
    write(row.parked, count(one.parked));
    write(row.longest, one.oldest_at === null ? "–" : seconds(Math.max(0, frame.now - one.oldest_at)));
    write(row.ttft, one.ttft.p50 === null ? "–" : pair(one.ttft.p50, one.ttft.p99));
    write(row.rate, one.tokens_per_s ? count(one.tokens_per_s) : "–");
    write(row.why, one.reason);
    row.element.classList.toggle("quiet", !(one.waiting + one.running + one.parked));
    this.showAction(row, one, frame);
  }

  showAction(row, one, frame) {
    const mayUnload = frame.may_load && one.id !== 0 && one.is_loaded && one.is_current;
    if (mayUnload === Boolean(row.button)) return;
    row.button = mayUnload ? make("button", "quiet-button", "Unload") : null;
    row.action.replaceChildren(...(mayUnload ? [row.button] : []));
    row.button?.addEventListener("click", () => this.unload(row.button, one));
  }

  /** The first click asks for a second one. The form gets the unloaded adapter's name and path, to load it again. */
  unload(button, { name, path }) {
    if (!button.dataset.sure) {
      button.dataset.sure = "yes";
      button.textContent = "Sure?";
      setTimeout(() => {
        delete button.dataset.sure;
        button.textContent = "Unload";
      }, CONFIRM_MS);
      return;
    }
    this.form.elements.lora_name.value = name;
    this.form.elements.lora_path.value = path;
    this.act("unload_lora_adapter", { lora_name: name }, `Unloading ${name} …`, `${name} is unloaded.`);
  }

  async act(route, body, doing, done) {
    const outcome = find("outcome");
    outcome.dataset.kind = "wait";
    write(outcome, doing);
    const { isDone, message } = await post(route, body);
    outcome.dataset.kind = isDone ? "good" : "bad";
    write(outcome, message ?? done);
  }
}

function whereIs(one, frame) {
  if (one.id === 0) return "needs no slot";
  const drain = frame.drains.find((other) => other.victim === one.id && isOn(other, frame.now));
  const resident = frame.residents.find((other) => other.adapter === one.id);
  if (!resident) return one.is_loaded ? PLACES[one.place] ?? "out" : "unloaded";
  if (resident.state === "loading") return `loading, slot ${resident.slot + 1}`;
  return drain ? `drains, slot ${resident.slot + 1}` : `slot ${resident.slot + 1}`;
}
