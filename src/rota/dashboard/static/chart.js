// A chart of the window, drawn as SVG without a library.

import { find, make, tell, write } from "./dom.js";
import { count, seconds } from "./format.js";

const [WIDTH, HEIGHT] = [600, 140];

function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Durations differ by powers of ten, so their scale is logarithmic. A rate's scale starts at zero. */
function logScale(values) {
  const low = Math.floor(Math.log10(Math.max(1e-4, Math.min(...values))));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...values))));
  const marks = [];
  for (let power = low; power <= high; power++) marks.push(10 ** power);
  return { y: (value) => HEIGHT * (1 - (Math.log10(Math.max(value, 10 ** low)) - low) / (high - low)), marks };
}

function linearScale(values) {
  const most = Math.max(1, ...values);
  const step = 10 ** Math.floor(Math.log10(most));
  const top = [1, 2, 3, 4, 5, 6, 8, 10].map((part) => part * step).find((part) => part >= most);
  return { y: (value) => HEIGHT * (1 - value / top), marks: [0, top / 2, top] };
}

class Chart {
  constructor(title, about, lines, format, scale) {
    Object.assign(this, { lines, format, scale });
    this.svg = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.svg.setAttribute("aria-label", `${title}: ${about}`);
    this.marks = make("div", "marks");
    this.values = lines.map((_, index) => make("b", `line-${index}`));
    this.begin = make("span");
    const entry = (line, index) => (line ? [make("span", "muted", line), this.values[index]] : [this.values[index]]);
    const legend = make("span", "legend-line", ...lines.flatMap(entry));
    const plot = make("div", "plot", this.svg, this.marks);
    this.element = make(
      "div",
      "card chart",
      make("div", "title", make("h2", "", title), make("span", "muted", about), make("span", "spring"), legend),
      plot,
      make("div", "chart-axis", this.begin, make("span", "", "now")),
    );
    this.element.dataset.lines = lines.length;
    plot.addEventListener("pointermove", (event) => this.explain(event, plot));
    plot.addEventListener("pointerleave", () => (find("tip").hidden = true));
  }

  /** Draws one line per series. The newest point is always at the right edge. */
  show(series, everyS, windowS) {
    this.everyS = everyS;
    const points = (this.points = Math.round(windowS / everyS));
    this.series = series.map((values) => [...Array(Math.max(0, points - values.length)).fill(null), ...values].slice(-points));
    const known = this.series.flat().filter((value) => value !== null && value > 0);
    const { y, marks } = this.scale(known.length ? known : [0.01, 0.1]);
    const shapes = marks.map((mark) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y(mark), y2: y(mark) }));
    if (series.length > 1) shapes.push(svg("path", { class: "between", d: between(...this.series, y) }));
    this.series.forEach((values, index) => {
      shapes.push(svg("path", { class: `line line-${index}`, d: path(values, y) }));
      write(this.values[index], values.at(-1) === null ? "–" : this.format(values.at(-1)));
    });
    this.svg.replaceChildren(...shapes);
    this.marks.replaceChildren(...marks.map((mark) => this.markAt(mark, y(mark))));
    write(this.begin, `${windowS / 60} min ago`);
  }

  markAt(mark, y) {
    const label = make("span", "", this.format === seconds && mark >= 1 ? `${mark} s` : this.format(mark).replace(".0 ", " "));
    label.style.top = `${(100 * y) / HEIGHT}%`;
    return label;
  }

  explain(event, plot) {
    const box = plot.getBoundingClientRect();
    const index = Math.round(((event.clientX - box.left) / box.width) * (this.points - 1));
    const values = this.series?.map((line) => line[index]) ?? [];
    if (values.every((value) => value === null || value === undefined)) return void (find("tip").hidden = true);
    const ago = (this.points - 1 - index) * this.everyS;
    const lines = this.lines.map((line, at) => `${line} ${this.format(values[at])}`.trim());
    tell(find("tip"), [ago ? `${seconds(ago)} ago` : "now", ...lines], event.clientX, event.clientY);
  }
}

const xOf = (index, values) => (WIDTH * index) / (values.length - 1);

/** The area between two lines, wherever both have a value. */
function between(upper, lower, y) {
  const known = upper.map((_, index) => index).filter((index) => upper[index] !== null && lower[index] !== null);
  const runs = known.reduce((all, index) => {
    if (all.at(-1)?.at(-1) === index - 1) all.at(-1).push(index);
    else all.push([index]);
    return all;
  }, []);
  const corner = (values) => (index) => `${xOf(index, values).toFixed(1)} ${y(values[index]).toFixed(1)}`;
  return runs.map((run) => `M${run.map(corner(upper)).join("L")}L${[...run].reverse().map(corner(lower)).join("L")}Z`).join("");
}

/** A line, with a gap wherever there was nothing to measure. */
function path(values, y) {
  let line = "";
  values.forEach((value, index) => {
    if (value === null) return;
    const isNew = index === 0 || values[index - 1] === null;
    const x = xOf(index, values);
    line += `${isNew ? "M" : "L"}${x.toFixed(1)} ${y(value).toFixed(1)}`;
    if (isNew && (index + 1 === values.length || values[index + 1] === null)) line += "h1";
  });
  return line;
}

export class Charts {
  constructor() {
    const spread = ["P99", "P50"];
    this.ttft = new Chart("First token", "time from the request to it", spread, seconds, logScale);
    this.gap = new Chart("Token gap", "time between two tokens of an answer", spread, seconds, logScale);
    this.tokens = new Chart("Output", "tokens per second", [""], count, linearScale);
    this.step = new Chart("Step", "time of one step on the device", spread, seconds, logScale);
    for (const chart of [this.ttft, this.gap, this.tokens, this.step]) find("charts").append(chart.element);
  }

  show({ charts, window_s: windowS }) {
    if (!charts) return;
    for (const name of ["ttft", "gap", "step"]) {
      this[name].show(["p99", "p50"].map((share) => charts.points.map((one) => one[name][share])), charts.every_s, windowS);
    }
    this.tokens.show([charts.points.map((one) => one.tokens_per_s)], charts.every_s, windowS);
  }
}
