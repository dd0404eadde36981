// The rows of a table, each by its key. Rows that stay are written again, so that a selection and the focus stay too.

import { make, write } from "./dom.js";

const PATIENCE_MS = 1000;

export class Rows {
  /** `cells`: a column's name, and its label on a phone. A column with a label holds numbers. */
  constructor(body, cells) {
    Object.assign(this, { body, cells, rows: new Map() });
  }

  /** Pairs of a key and the texts by column, in order. A row without texts stays as it is. */
  show(pairs) {
    const wanted = new Set(pairs.map(([key]) => key));
    for (const [key, row] of this.rows) {
      if (wanted.has(key)) continue;
      row.element.remove();
      this.rows.delete(key);
    }
    let next = this.body.firstElementChild;
    for (const [key, texts] of pairs) {
      const row = this.rowOf(key);
      for (const name of Object.keys(texts ?? {})) write(row[name], texts[name]);
      if (row.element === next) next = next.nextElementSibling;
      else this.body.insertBefore(row.element, next);
    }
  }

  rowOf(key) {
    if (this.rows.has(key)) return this.rows.get(key);
    const row = { element: make("tr") };
    row.element.dataset.key = key;
    for (const [name, label] of Object.entries(this.cells)) {
      row[name] = make("td", `${name}${label ? " number" : ""}`);
      if (label) row[name].dataset.label = label;
      row.element.append(row[name]);
    }
    this.rows.set(key, row);
    return row;
  }
}

/** The order that the buttons in a table's heads choose: by a column, the other way round, then as it comes. */
export class Order {
  /** `values`: what a row is sorted by, for each `data-column` of a head. Numbers begin with the largest. */
  constructor(table, values, onChange = () => {}) {
    Object.assign(this, { values, onChange, column: "", sign: 1, places: new Map(), sortedAt: 0 });
    this.heads = [...table.querySelectorAll("th[data-column]")];
    for (const head of this.heads) {
      const button = make("button", "sort", ...head.childNodes);
      button.type = "button";
      button.addEventListener("click", () => this.turn(head));
      head.replaceChildren(button);
    }
  }

  turn(head) {
    const { column } = head.dataset;
    const first = head.classList.contains("number") ? -1 : 1;
    if (this.column !== column) this.choose(column, first);
    else if (this.sign === first) this.choose(column, -first);
    else this.choose("", 1);
  }

  choose(column, sign) {
    Object.assign(this, { column, sign, sortedAt: 0 });
    for (const head of this.heads) {
      if (head.dataset.column === column) head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    this.onChange();
  }

  /** The rows in order. While figures change, rows change places once a second and not with every frame. */
  of(rows, keyOf = (row) => row.id) {
    if (!this.column) return rows;
    if (performance.now() - this.sortedAt > PATIENCE_MS || rows.some((row) => !this.places.has(keyOf(row)))) {
      const value = this.values[this.column];
      const ordered = [...rows].sort((a, b) => this.sign * compared(value(a), value(b), this.sign));
      this.places = new Map(ordered.map((row, place) => [keyOf(row), place]));
      this.sortedAt = performance.now();
    }
    return [...rows].sort((a, b) => this.places.get(keyOf(a)) - this.places.get(keyOf(b)));
  }
}

/** What is not known comes last in either direction. */
function compared(a, b, sign) {
  if (a === null || b === null) return sign * ((a === null) - (b === null));
  return typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true });
}
