// The table of tenants: who waits, who runs, and how many tokens each gets. Without keys there are no tenants to show.

import { Rows } from "./rows.js";
import { find, write } from "./dom.js";
import { count, pair } from "./format.js";

const CELLS = { name: "", waiting: "waiting", running: "running", parked: "parked", ttft: "first token", rate: "tokens/s" };

export class Tenants {
  constructor() {
    this.rows = new Rows(find("tenants").querySelector("tbody"), CELLS);
  }

  show({ tenants, unlisted_tenants: unlisted }) {
    find("tenants").hidden = !tenants.length;
    this.rows.show(tenants.map((one) => [one.name, {
      name: one.name,
      waiting: count(one.waiting),
      running: count(one.running),
      parked: count(one.parked),
      ttft: one.ttft.p50 === null ? "–" : pair(one.ttft.p50, one.ttft.p99),
      rate: one.tokens_per_s ? count(one.tokens_per_s) : "–",
    }]));
    write(find("tenants-note"), `${count(tenants.length)}${unlisted ? ` · ${count(unlisted)} more` : ""}`);
  }
}
