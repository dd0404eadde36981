// The strip has one lane per slot of every engine and one colour per adapter, and moves; its right edge is now.

import { colour, theme } from "./colours.js";
import { find, make, readable, write } from "./dom.js";
import { isOn, seconds } from "./format.js";

const KEPT_S = 65;

const isIn = (lane) => (one) => one.slot === lane.slot && one.engine === lane.engine;
const isOf = (drain, tenure) => drain.victim === tenure.adapter && drain.engine === tenure.engine;

export class Strip {
  constructor() {
    this.lanes = [];
    this.past = [];
    this.all = [];
    this.drains = [];
    this.names = new Map();
    this.window = 60;
    this.now = 0;
    for (const button of document.querySelectorAll("[data-window]")) {
      button.addEventListener("click", () => this.look(Number(button.dataset.window)));
    }
    this.look(this.window);
    // A strip that is out of sight costs nothing: below it there may be hundreds of rows.
    this.isSeen = true;
    new IntersectionObserver(([entry]) => (this.isSeen = entry.isIntersecting)).observe(find("lanes"));
  }

  look(window) {
    this.window = window;
    for (const button of document.querySelectorAll("[data-window]")) {
      button.setAttribute("aria-pressed", String(Number(button.dataset.window) === window));
    }
    const marks = [4, 3, 2, 1, 0].map((part) => (part ? `${(window * part) / 4} s ago` : "now"));
    find("axis").replaceChildren(...marks.map((mark) => make("span", "", mark)));
  }

  show(frame) {
    // Names are kept after their row has gone: the strip still shows the adapter.
    if (frame.is_whole) this.names.clear();
    for (const row of frame.adapters) this.names.set(row.id, row.name);
    this.past = (frame.is_whole ? frame.tenures : this.past.concat(frame.tenures)).filter((one) => one.ended_at > frame.now - KEPT_S);
    const isNew = (one) => !this.past.some((other) => isIn(one)(other) && other.begun_at === one.begun_at);
    this.all = this.past.concat(frame.residents.filter(isNew));
    this.drains = frame.drains;
    this.keepLanes(frame);
    this.note(frame);
    for (const lane of this.lanes) this.label(lane, frame);
  }

  keepLanes(frame) {
    const places = frame.engines.flatMap(({ id, slots }) => {
      const seen = frame.residents.filter((one) => one.engine === id).map((one) => one.slot + 1);
      return Array.from({ length: Math.max(slots, ...seen, 0) }, (_, slot) => [id, slot]);
    });
    const isSame = places.length === this.lanes.length && this.lanes.every((lane, at) => isIn(lane)({ engine: places[at][0], slot: places[at][1] }));
    if (isSame) return;
    const hasReplicas = frame.engines.length > 1;
    this.lanes = places.map(([engine, slot]) => this.makeLane(engine, slot, hasReplicas));
    find("lanes").replaceChildren(...this.lanes.map((lane) => lane.element));
    find("lanes").classList.toggle("dense", places.length > 12);
  }

  makeLane(engine, slot, hasReplicas) {
    const place = hasReplicas ? `${engine}·${slot + 1}` : String(slot + 1);
    const title = hasReplicas ? `Replica ${engine}, slot ${slot + 1}` : `Slot ${slot + 1}`;
    const lane = { engine, slot, title, swatch: make("i", "swatch"), name: make("b"), state: make("span", "state"), why: make("small", "why") };
    lane.canvas = make("canvas");
    lane.label = make("div", "label", make("span", "slot-number", place), lane.swatch, lane.name, lane.state, lane.why);
    lane.element = make("div", engine && !slot ? "lane first-of-replica" : "lane", lane.label, lane.canvas);
    lane.element.dataset.slot = slot;
    lane.element.dataset.engine = engine;
    readable(lane.canvas, title, (share) => this.explain(lane, share));
    return lane;
  }

  note(frame) {
    const on = frame.engines.length > 1 ? ` on ${frame.engines.length} replicas` : "";
    const known = frame.slots ? `${frame.slots} adapters run at a time${on}` : "which adapter was in which slot";
    write(find("slots-note"), frame.phase === "ready" && !frame.slots ? "this model serves no adapters" : known);
  }

  label(lane, frame) {
    const resident = frame.residents.find(isIn(lane));
    lane.element.dataset.state = resident?.state ?? "empty";
    lane.swatch.style.background = resident ? colour(resident.adapter) : "";
    write(lane.name, resident ? this.nameOf(resident.adapter) : "");
    lane.name.title = lane.name.textContent;
    const drain = resident && this.drains.find((one) => isOf(one, resident) && isOn(one, frame.now));
    const [state, since] = drain ? ["draining", drain.begun_at] : [resident?.state, resident?.begun_at];
    write(lane.state, resident ? `${state} ${seconds(Math.max(0, frame.now - since))}` : "empty");
    write(lane.why, drain ? `makes room for ${this.nameOf(drain.beneficiary)}` : (resident?.reason ?? ""));
    lane.canvas.setAttribute("aria-label", `${lane.title}: ${lane.name.textContent} ${lane.state.textContent}`);
  }

  nameOf(adapter) {
    return this.names.get(adapter) ?? `adapter ${adapter}`;
  }

  /** The visible tenures of a lane. */
  tenures(lane) {
    const begin = this.now - this.window;
    return this.all.filter((one) => isIn(lane)(one) && one.begun_at < this.now && (one.ended_at ?? Infinity) > begin);
  }

  draw(now) {
    this.now = now;
    if (this.isSeen) for (const lane of this.lanes) this.drawLane(lane);
  }

  drawLane(lane) {
    const { canvas } = lane;
    const ratio = devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "500 11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const x = (at) => width * (1 - (this.now - at) / this.window);
    for (const one of this.tenures(lane)) {
      const left = Math.max(0, x(one.begun_at));
      const right = Math.min(width, x(one.ended_at ?? this.now));
      drawTenure(pen, one, left, Math.max(right, left + 1), height);
      for (const drain of this.drains) {
        if (!isOf(drain, one) || one.state !== "ready") continue;
        const from = Math.max(left, x(drain.begun_at));
        const to = Math.min(right, x(drain.ended_at ?? this.now));
        if (to > from) drawDrain(pen, from, Math.max(to, from + 3), height);
      }
      if (one.state === "ready" && height > 15) this.drawName(pen, one, left, right, height);
    }
  }

  drawName(pen, one, left, right, height) {
    const name = this.nameOf(one.adapter);
    if (right - left < 26 || pen.measureText(name).width > right - left - 12) return;
    pen.fillStyle = theme.isDark ? "oklch(0.2 0.02 250)" : "white";
    pen.fillText(name, left + 6, height / 2 + 0.5);
  }

  explain(lane, share) {
    const at = this.now - this.window * (1 - share);
    const one = this.tenures(lane).find((other) => isOn(other, share < 1 ? at : at - 1e-3));
    if (!one) return null;
    const lasted = seconds(Math.min(one.ended_at ?? Infinity, this.now) - one.begun_at);
    const lines = [this.nameOf(one.adapter), `${one.state} for ${lasted}`];
    if (one.reason) lines.push(`because ${one.reason}`);
    for (const drain of this.drains) {
      if (isOf(drain, one) && isOn(drain, at)) lines.push(`draining for ${this.nameOf(drain.beneficiary)}`);
    }
    return lines;
  }
}

function drawTenure(pen, one, left, right, height) {
  const isReady = one.state === "ready";
  const gap = right - left > 4 ? 1 : 0;
  const top = isReady ? 0 : height * 0.3;
  pen.globalAlpha = isReady ? 1 : 0.42;
  pen.fillStyle = colour(one.adapter);
  pen.beginPath();
  pen.roundRect(left, top, right - left - gap, height - top, Math.min(3, (right - left) / 4));
  pen.fill();
  pen.globalAlpha = 1;
}

function drawDrain(pen, from, to, height) {
  pen.save();
  pen.beginPath();
  pen.rect(from, 0, to - from, height);
  pen.clip();
  pen.strokeStyle = theme.isDark ? "oklch(0.2 0.02 250 / 0.4)" : "oklch(1 0 0 / 0.5)";
  pen.lineWidth = 2;
  pen.beginPath();
  // Stripes begin at the drain's left edge, so they move with it.
  for (let x = from - height; x < to; x += 6) {
    pen.moveTo(x, height);
    pen.lineTo(x + height, 0);
  }
  pen.stroke();
  pen.restore();
}
