// The table of traffic: where the requests of a name go, by weight. Without such a name there is nothing to show.

import { Rows } from "./rows.js";
import { find, write } from "./dom.js";
import { count, percent } from "./format.js";

const CELLS = { name: "", target: "", share: "share", requests: "requests", sentence: "" };

export class Traffic {
  constructor() {
    this.rows = new Rows(find("traffic").querySelector("tbody"), CELLS);
  }

  show({ targets }) {
    find("traffic").hidden = !targets.length;
    this.rows.show(targets.map((one, index) => [`${one.name} ${one.target}`, {
      name: targets[index - 1]?.name === one.name ? "" : one.name,
      target: one.target,
      share: one.weight === null ? "–" : percent(one.weight),
      requests: one.weight === null ? "–" : count(one.requests),
      sentence: one.note,
    }]));
    const names = new Set(targets.map((one) => one.name)).size;
    write(find("traffic-note"), `${count(names)} ${names === 1 ? "adapter" : "adapters"}`);
  }
}
