// The figures at the top: what an operator wants to know first. The first four are of now, the others of the window.

import { count, percent, seconds } from "./format.js";
import { find, make, write } from "./dom.js";

const FIGURES = [
  ["Running", (f) => count(f.running), (f) => (f.rows ? `of ${count(f.rows)} at most` : "in steps now")],
  ["Waiting", (f) => count(f.waiting), longestWait],
  ["Parked", (f) => count(f.parked), () => "adapter out of its slot"],
  ["KV in use", (f) => (f.blocks ? percent(f.blocks_used / f.blocks) : "–"), kvNote, (f) => (f.blocks ? f.blocks_used / f.blocks : 0)],
  ["Output", (f) => count(f.mean_tokens_per_s), (f) => `tokens/s · now ${count(f.tokens_per_s)} · prompts ${count(f.mean_prompt_tokens_per_s)}`],
  ["First token", (f) => seconds(f.ttft.p50), (f) => `P50 · P99 ${seconds(f.ttft.p99)}`],
  ["Token gap", (f) => seconds(f.gap.p50), (f) => `P50 · P99 ${seconds(f.gap.p99)}`],
  ["Visible stall", (f) => seconds(f.stall.p99), (f) => (f.reader_pace ? `P99 · P50 ${seconds(f.stall.p50)}` : "nobody reads")],
  ["Step", (f) => seconds(f.step.p50), (f) => `P50 · P99 ${seconds(f.step.p99)}`],
];

function longestWait(frame) {
  const oldest = Math.min(...frame.adapters.map((row) => row.oldest_at ?? Infinity));
  return Number.isFinite(oldest) ? `longest ${seconds(Math.max(0, frame.now - oldest))}` : "none";
}

function kvNote(frame) {
  if (frame.blocks) return `${count(frame.blocks_used)} of ${count(frame.blocks)} blocks`;
  if (frame.phase === "replay") return "not in a journal";
  return frame.phase === "ready" ? "not told yet" : "no engine serves now";
}

export class Figures {
  constructor() {
    this.cells = FIGURES.map(([name, , , level]) => {
      const cell = { value: make("div", "value", "–"), note: make("div", "note", "") };
      const figure = make("div", "figure", make("div", "name", name), cell.value, cell.note);
      figure.dataset.figure = name;
      if (level) {
        cell.bar = make("i");
        figure.append(make("div", "level", cell.bar));
      }
      find("figures").append(figure);
      return cell;
    });
  }

  show(frame) {
    this.cells.forEach((cell, index) => {
      const [, value, note, level] = FIGURES[index];
      write(cell.value, value(frame));
      write(cell.note, note(frame));
      if (level) cell.bar.style.width = `${100 * level(frame)}%`;
    });
  }
}
