// The table of tenants: who waits, who runs, what each may spend, and its errors. Without keys there are none to show.

import { Order, Rows } from "./rows.js";
import { find, make, write } from "./dom.js";
import { count, pair } from "./format.js";

const CELLS = {
  name: "", waiting: "waiting", running: "running", parked: "parked", ttft: "first token", rate: "tokens/s", errors: "errors", limits: "",
};
const LIMITS = {
  requests_per_minute: "requests a minute",
  tokens_per_minute: "tokens a minute",
  max_tokens_in_flight: "tokens in flight",
  max_running: "answers running",
  max_queued: "answers waiting",
};
const errorsOf = (row) => row.errors.reduce((sum, [, number]) => sum + number, 0);
const VALUES = {
  name: (row) => row.name,
  waiting: (row) => row.waiting,
  running: (row) => row.running,
  parked: (row) => row.parked,
  ttft: (row) => row.ttft.p50,
  rate: (row) => row.tokens_per_s,
  errors: errorsOf,
};

export class Tenants {
  constructor() {
    const table = find("tenants").querySelector("table");
    this.rows = new Rows(table.tBodies[0], CELLS);
    this.order = new Order(table, VALUES, () => this.frame && this.show(this.frame));
  }

  show(frame) {
    this.frame = frame;
    const { tenants, unlisted_tenants: unlisted } = frame;
    find("tenants").hidden = !tenants.length;
    this.rows.show(this.order.of(tenants, (row) => row.name).map((one) => [one.name, {
      name: one.name,
      waiting: count(one.waiting),
      running: count(one.running),
      parked: count(one.parked),
      ttft: one.ttft.p50 === null ? "–" : pair(one.ttft.p50, one.ttft.p99),
      rate: one.tokens_per_s ? count(one.tokens_per_s) : "–",
    }]));
    for (const one of tenants) {
      const row = this.rows.rowOf(one.name);
      lines(row.errors, one.errors.map(([kind, number]) => `${count(number)} ${kind.replaceAll("_", " ")}`), () => false);
      lines(row.limits, one.limits.map(({ limit, used, most }) => `${count(used)} of ${count(most)} ${LIMITS[limit] ?? limit}`), (at) => one.limits[at].used >= one.limits[at].most);
    }
    write(find("tenants-note"), `${count(tenants.length)}${unlisted ? ` · ${count(unlisted)} more` : ""}`);
  }
}

function lines(cell, texts, isBad) {
  if (cell.childElementCount !== texts.length) cell.replaceChildren(...texts.map(() => make("div")));
  texts.forEach((text, at) => {
    write(cell.children[at], text);
    cell.children[at].classList.toggle("bad", isBad(at));
  });
}
