// Errors that clients were told, by kind, and engines that stand still or were started again.

import { Rows } from "./rows.js";
import { find, make, write } from "./dom.js";
import { count, seconds } from "./format.js";

const CELLS = { kind: "", recent: "in this time", total: "in all", last: "last", sentence: "" };

function counted(number, word) {
  return `${number ? count(number) : "no"} ${word}${number === 1 ? "" : "s"}`;
}

export class Trouble {
  constructor() {
    this.rows = new Rows(find("errors").tBodies[0], CELLS);
    this.told = "";
  }

  show({ now, engines, errors, restarts, restarts_total: total }) {
    const ago = (at) => `${seconds(Math.max(0, now - at))} ago`;
    find("errors").hidden = !errors.length;
    this.rows.show(errors.map((one) => [one.kind, {
      kind: one.kind.replaceAll("_", " "),
      recent: count(one.recent),
      total: count(one.total),
      last: ago(one.last_at),
      sentence: one.sentence,
    }]));
    const still = engines.filter((one) => one.standstill).map((one) => `Engine ${one.id} stands still. ${one.standstill}`);
    this.showRestarts([...still, ...restarts.map((one) => `Engine ${one.engine} was started again ${ago(one.at)}: ${one.reason}`).reverse()]);
    const recent = errors.reduce((sum, one) => sum + one.recent, 0);
    write(find("trouble-note"), `${counted(total, "restart")}, ${counted(recent, "error")} in this time`);
  }

  showRestarts(lines) {
    if (this.told === lines.join("\n")) return;
    this.told = lines.join("\n");
    find("restarts").replaceChildren(...lines.map((line) => make("li", "", line)));
  }
}
