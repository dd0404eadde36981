// Beside the tiles: what an operator should read, errors that clients were told, and engines that were started again.

import { Rows } from "./rows.js";
import { find, make, write } from "./dom.js";
import { count, seconds } from "./format.js";

const CELLS = { kind: "", recent: "in this time", total: "in all", last: "last", sentence: "" };

function counted(number, word) {
  return `${number ? count(number) : "no"} ${word}${number === 1 ? "" : "s"}`;
}

function list(element, lines) {
  if ([...element.children].map((one) => one.textContent).join("\n") === lines.join("\n")) return;
  element.replaceChildren(...lines.map((line) => make("li", "", line)));
}

export class Trouble {
  constructor() {
    this.rows = new Rows(find("errors").tBodies[0], CELLS);
  }

  show({ now, notices, errors, restarts, restarts_total: total }) {
    const ago = (at) => `${seconds(Math.max(0, now - at))} ago`;
    find("errors").hidden = !errors.length;
    this.rows.show(errors.map((one) => [one.kind, {
      kind: one.kind.replaceAll("_", " "),
      recent: count(one.recent),
      total: count(one.total),
      last: ago(one.last_at),
      sentence: one.sentence,
    }]));
    list(find("notices"), notices);
    list(find("restarts"), restarts.map((one) => `Engine ${one.engine} was started again ${ago(one.at)}: ${one.reason}`).reverse());
    const recent = errors.reduce((sum, one) => sum + one.recent, 0);
    write(find("trouble-note"), `${counted(total, "restart")}, ${counted(recent, "error")} in this time`);
    find("calm").hidden = notices.length + errors.length + restarts.length > 0;
  }
}
