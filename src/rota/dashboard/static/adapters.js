// The table of adapters shows each adapter's requests and why they wait, and may load and unload adapters.

import { colour, theme } from "./colours.js";
import { find, make, write } from "./dom.js";
import { count, isOn, pair, seconds } from "./format.js";
import { post } from "./live.js";
import { Order, Rows } from "./rows.js";

const CELLS = {
  name: "", where: "", waiting: "waiting", running: "running", parked: "parked", longest: "longest wait",
  ttft: "first token", rate: "tokens/s", loads: "loads", rank: "rank", why: "", action: "",
};
const VALUES = {
  name: (row) => row.name,
  where: (row) => row.whereabouts,
  waiting: (row) => row.waiting,
  running: (row) => row.running,
  parked: (row) => row.parked,
  longest: (row) => (row.oldest_at === null ? null : -row.oldest_at),
  ttft: (row) => row.ttft.p50,
  rate: (row) => row.tokens_per_s,
  loads: (row) => row.loads,
  rank: (row) => row.rank || null,
};
const PLACES = { host: "in memory", reading: "being read", disk: "on disk", source: "at its source" };
const CONFIRM_MS = 4000;
const FEW = 8; // idle adapters are shown like all others

const sum = (row) => row.running + row.parked + row.waiting;

export class Adapters {
  constructor(onAsk) {
    this.onAsk = onAsk;
    this.table = find("adapters");
    this.rows = new Rows(this.table.tBodies[0], CELLS);
    const again = () => this.frame && this.show(this.frame);
    this.order = new Order(this.table, VALUES, () => {
      find("sort").value = this.order.column;
      again();
    });
    find("sort").addEventListener("change", ({ target }) => {
      const head = this.table.querySelector(`th[data-column="${target.value}"]`);
      this.order.choose(target.value, head?.classList.contains("number") ? -1 : 1);
    });
    find("search").addEventListener("input", again);
    find("fold").addEventListener("click", () => {
      find("fold").setAttribute("aria-expanded", String(find("fold").ariaExpanded !== "true"));
      again();
    });
    this.form = find("load");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      const { lora_name, lora_path, pinned } = this.form.elements;
      const asked = { lora_name: lora_name.value.trim(), lora_path: lora_path.value.trim(), pinned: pinned.checked };
      this.act("load_lora_adapter", asked, `Loading ${asked.lora_name} …`, `${asked.lora_name} is loaded.`);
    });
  }

  show(frame) {
    this.frame = frame;
    this.form.hidden = !frame.may_load;
    const seated = new Map(frame.residents.map((one) => [one.adapter, one]));
    for (const row of frame.adapters) row.whereabouts = whereIs(row, seated.get(row.id), frame);
    const isIdle = (row) => row.id !== 0 && !sum(row) && !row.tokens_per_s && !row.loads && !seated.has(row.id);
    const sought = find("search").value.trim().toLowerCase();
    const found = frame.adapters.filter((row) => !sought || row.name.toLowerCase().includes(sought));
    const idle = found.filter(isIdle);
    const canFold = !sought && idle.length > FEW;
    const isFolded = canFold && find("fold").ariaExpanded !== "true";
    find("fold").hidden = !canFold;
    write(find("fold"), isFolded ? `Show ${count(idle.length)} idle adapters` : `Fold ${count(idle.length)} idle adapters`);
    const shown = this.order.of(isFolded ? found.filter((row) => !isIdle(row)) : found);
    const most = Math.max(1, ...shown.map(sum));
    const around = `${most} ${theme.isDark} ${frame.may_load} ${frame.phase}`;
    const isNew = new Set(shown.filter((row) => this.isNew(row, around)));
    this.rows.show(shown.map((row) => [row.id, isNew.has(row) ? textsOf(row, frame) : null]));
    for (const row of isNew) this.decorate(this.rows.rowOf(row.id), row, frame, most);
    this.note(frame, found.length, sought);
  }

  /** Of hundreds of rows few change from frame to frame, and those that did not are the same objects. */
  isNew(one, around) {
    const row = this.rows.rowOf(one.id);
    const is = `${one.whereabouts} ${around}`;
    if (row.one === one && row.is === is && one.oldest_at === null) return false;
    Object.assign(row, { one, is });
    return true;
  }

  note(frame, found, sought) {
    const all = frame.adapters.length - 1;
    const more = frame.unlisted ? ` · ${count(frame.unlisted)} more without requests are not listed` : "";
    const busy = frame.adapters.filter((row) => row.id && sum(row)).length;
    write(find("adapters-note"), sought ? `${count(found)} of ${count(all + 1)} match` : `${count(all)} and the base model · ${count(busy)} with requests${more}`);
  }

  /** What is not text: colours, bars and buttons. */
  decorate(row, one, frame, most) {
    if (!row.label) {
      row.element.dataset.adapter = one.id;
      row.swatch = make("i", "swatch");
      row.label = make("b");
      row.bars = ["running", "parked", "waiting"].map((kind) => make("i", kind));
      row.name.append(make("span", "full-name", row.swatch, row.label), make("span", "bars", ...row.bars));
      row.ask = make("button", "quiet-button", "Ask");
      row.ask.addEventListener("click", () => this.onAsk(row.label.textContent));
      row.action.append(row.ask);
    }
    const tint = colour(one.id);
    if (row.tint !== tint) for (const part of [row.swatch, ...row.bars]) part.style.background = row.tint = tint;
    write(row.label, one.version > 1 || !one.is_current ? `${one.name}@${one.version}` : one.name);
    row.label.title = one.is_current ? one.path : `${one.name} does not mean this version now`;
    [one.running, one.parked, one.waiting].forEach((number, index) => (row.bars[index].style.width = `${(100 * number) / most}%`));
    row.element.classList.toggle("quiet", !sum(one));
    row.ask.hidden = frame.phase === "replay" || !one.is_loaded;
    row.ask.setAttribute("aria-label", `Ask ${one.name}`);
    const mayUnload = frame.may_load && one.id !== 0 && one.is_loaded && one.is_current;
    if (mayUnload === Boolean(row.unload)) return;
    row.unload?.remove();
    row.unload = mayUnload ? make("button", "quiet-button unload", "Unload") : null;
    if (!mayUnload) return;
    row.unload.setAttribute("aria-label", `Unload ${one.name}`);
    row.action.append(row.unload);
    row.unload.addEventListener("click", () => this.unload(row.unload, one));
  }

  /** The first click asks for a second one. The form gets the unloaded adapter's name and path, to load it again. */
  unload(button, { name, path }) {
    if (!button.dataset.sure) {
      button.dataset.sure = "yes";
      button.textContent = "Sure?";
      button.setAttribute("aria-label", `Sure? Unload ${name}`);
      setTimeout(() => {
        delete button.dataset.sure;
        button.textContent = "Unload";
        button.setAttribute("aria-label", `Unload ${name}`);
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

function textsOf(one, frame) {
  return {
    where: one.whereabouts,
    waiting: count(one.waiting),
    running: count(one.running),
    parked: count(one.parked),
    longest: one.oldest_at === null ? "–" : seconds(Math.max(0, frame.now - one.oldest_at)),
    ttft: one.ttft.p50 === null ? "–" : pair(one.ttft.p50, one.ttft.p99),
    rate: one.tokens_per_s ? count(one.tokens_per_s) : "–",
    loads: one.loads ? count(one.loads) : "–",
    rank: one.rank ? count(one.rank) : "–",
    why: one.reason,
  };
}

function whereIs(one, resident, frame) {
  if (one.id === 0) return "needs no slot";
  if (!resident) return one.is_loaded ? PLACES[one.place] ?? "out" : "unloaded";
  const drain = frame.drains.find((other) => other.victim === one.id && isOn(other, frame.now));
  if (resident.state === "loading") return `loading, slot ${resident.slot + 1}`;
  return drain ? `drains, slot ${resident.slot + 1}` : `slot ${resident.slot + 1}`;
}
