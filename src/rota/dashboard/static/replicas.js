// The table of replicas: how each engine stands. With one engine the tiles say it all.

import { Order, Rows } from "./rows.js";
import { find, write } from "./dom.js";
import { count, percent } from "./format.js";

const CELLS = {
  name: "", state: "", waiting: "waiting", running: "running", parked: "parked", kv: "KV in use", rate: "tokens/s",
  restarts: "restarts", sentence: "",
};
const VALUES = {
  name: (row) => row.id,
  state: (row) => row.phase,
  waiting: (row) => row.waiting,
  running: (row) => row.running,
  parked: (row) => row.parked,
  kv: (row) => (row.blocks ? row.blocks_used / row.blocks : null),
  rate: (row) => row.tokens_per_s,
  restarts: (row) => row.restarts,
};

export class Replicas {
  constructor() {
    const table = find("replicas").querySelector("table");
    this.rows = new Rows(table.tBodies[0], CELLS);
    this.order = new Order(table, VALUES, () => this.frame && this.show(this.frame));
  }

  show(frame) {
    this.frame = frame;
    const { engines, phase } = frame;
    find("replicas").hidden = engines.length < 2 || phase === "replay";
    if (find("replicas").hidden) return;
    this.rows.show(this.order.of(engines).map((one) => [one.id, {
      name: `Replica ${one.id}`,
      state: one.is_paused ? "paused" : one.phase,
      waiting: count(one.waiting),
      running: count(one.running),
      parked: count(one.parked),
      kv: one.blocks ? percent(one.blocks_used / one.blocks) : "–",
      rate: one.tokens_per_s ? count(one.tokens_per_s) : "–",
      restarts: count(one.restarts),
      sentence: one.reason,
    }]));
    for (const one of engines) this.rows.rowOf(one.id).element.dataset.phase = one.phase;
    write(find("replicas-note"), `${engines.filter((one) => one.phase === "ready").length} of ${engines.length} serve`);
  }
}
