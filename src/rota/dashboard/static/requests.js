// The table of open requests: those that waited longest, each with the reason why it does not run.

import { Order, Rows } from "./rows.js";
import { find, write } from "./dom.js";
import { count, seconds } from "./format.js";

const CELLS = { name: "", adapter: "", tenant: "", state: "", age: "open for", tokens: "tokens", why: "" };
const VALUES = {
  name: (row) => row.name,
  adapter: (row) => row.adapterName,
  tenant: (row) => row.tenant,
  state: (row) => row.state,
  age: (row) => -row.asked_at,
  tokens: (row) => row.tokens,
};

export class Requests {
  constructor() {
    const table = find("requests-table");
    this.rows = new Rows(table.tBodies[0], CELLS);
    this.order = new Order(table, VALUES, () => this.frame && this.show(this.frame));
  }

  show(frame) {
    this.frame = frame;
    const names = new Map(frame.adapters.map((row) => [row.id, row.name]));
    const rows = frame.requests.map((row) => ({ ...row, adapterName: names.get(row.adapter) ?? `adapter ${row.adapter}` }));
    find("requests-table").hidden = !rows.length;
    find("requests-table").classList.toggle("without-tenants", rows.every((row) => !row.tenant));
    const replica = (row) => (frame.engines.length > 1 && row.state !== "waiting" ? ` on ${row.engine}` : "");
    this.rows.show(this.order.of(rows).map((row) => [row.id, {
      name: row.name,
      adapter: row.adapterName,
      tenant: row.tenant,
      state: `${row.state}${replica(row)}`,
      age: seconds(Math.max(0, frame.now - row.asked_at)),
      tokens: row.tokens === null ? "–" : count(row.tokens),
      why: row.reason,
    }]));
    for (const row of rows) this.rows.rowOf(row.id).name.title = row.name;
    const more = frame.unlisted_requests;
    write(find("requests-note"), rows.length ? `${count(rows.length + more)} open${more ? ` · the ${count(rows.length)} that waited longest` : ""}` : "no request is open");
  }
}
