// A chart of the window, drawn as SVG without a library.

import { find, make, readable, write } from "./dom.js";
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
    this.svg = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.marks = make("div", "marks");
    this.values = lines.map((_, index) => make("b", `line-${index}`));
    this.begin = make("span");
    const entry = (line, index) => (line ? [make("span", "muted", line), this.values[index]] : [this.values[index]]);
    const legend = make("span", "legend-line", ...lines.flatMap(entry));
    const plot = make("div", "plot", this.svg, this.marks);
    this.element = make(
      "div",
      "card chart",
      make("div", "title", make("h2", "", title), make("span", "muted about", about), make("span", "spring"), legend),
      plot,
      make("div", "chart-axis", this.begin, make("span", "", "now")),
    );
    this.element.dataset.lines = lines.length;
    readable(plot, `${title}: ${about}`, (share) => this.explain(share));
  }

  /** Draws one line per series. The newest point is at the right edge. `deaths` are shares of the width. */
  show(series, everyS, windowS, deaths) {
    Object.assign(this, { everyS, deaths });
    const points = (this.points = Math.round(windowS / everyS));
    this.series = series.map((values) => [...Array(Math.max(0, points - values.length)).fill(null), ...values].slice(-points));
    const known = this.series.flat().filter((value) => value !== null && value > 0);
    const { y, marks } = this.scale(known.length ? known : [0.01, 0.1]);
    const shapes = marks.map((mark) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y(mark), y2: y(mark) }));
    shapes.push(...deaths.map((share) => svg("line", { class: "death", x1: share * WIDTH, x2: share * WIDTH, y1: 0, y2: HEIGHT })));
    if (series.length > 1) shapes.push(svg("path", { class: "between", d: between(...this.series, y) }));
    this.series.forEach((values, index) => {
      shapes.push(svg("path", { class: `line line-${index}`, d: path(values, y) }));
      write(this.values[index], values.at(-1) === null ? "–" : this.format(values.at(-1)));
    });
    this.svg.replaceChildren(...shapes);
    this.marks.replaceChildren(...marks.map((mark) => this.markAt(mark, y(mark))));
    write(this.begin, windowS < 3600 ? `${windowS / 60} min ago` : "1 h ago");
  }

  markAt(mark, y) {
    const label = make("span", "", this.format === seconds && mark >= 1 ? `${mark} s` : this.format(mark).replace(".0 ", " "));
    label.style.top = `${(100 * y) / HEIGHT}%`;
    return label;
  }

  explain(share) {
    const index = Math.round(share * (this.points - 1));
    const values = this.series?.map((line) => line[index]) ?? [];
    const lines = this.lines.map((line, at) => [line, values[at]]).filter(([, value]) => value !== null && value !== undefined);
    const died = this.deaths?.some((one) => Math.abs(one - share) < 0.015) ? ["an engine was started again"] : [];
    if (!lines.length && !died.length) return null;
    const ago = (this.points - 1 - index) * this.everyS;
    return [ago ? `${seconds(ago)} ago` : "now", ...lines.map(([line, value]) => `${line} ${this.format(value)}`.trim()), ...died];
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
    this.gap = new Chart("Token gap", "time between two tokens", spread, seconds, logScale);
    this.step = new Chart("Step", "time of one on the device", spread, seconds, logScale);
    this.tokens = new Chart("Output", "tokens per second", [""], count, linearScale);
    this.open = new Chart("Open requests", "the most at one moment", ["waiting", "admitted"], count, linearScale);
    this.errors = new Chart("Errors", "per minute", [""], count, linearScale);
    for (const chart of [this.ttft, this.gap, this.step, this.tokens, this.open, this.errors]) find("charts").append(chart.element);
  }

  show({ charts, window_s: windowS, restarts }) {
    if (!charts) return;
    const { points, every_s: everyS, ended_at: endedAt } = charts;
    const deaths = restarts.map((one) => 1 - (endedAt - one.at) / windowS).filter((share) => share > 0 && share <= 1);
    const draw = (chart, ...series) => chart.show(series.map((of) => points.map(of)), everyS, windowS, deaths);
    for (const name of ["ttft", "gap", "step"]) draw(this[name], (one) => one[name].p99, (one) => one[name].p50);
    draw(this.tokens, (one) => one.tokens_per_s);
    draw(this.open, (one) => one.waiting, (one) => one.admitted);
    draw(this.errors, (one) => one.errors_per_min);
  }
}
