// The rows of a plain table, each by its key. Rows that stay are written again, so that a selection stays too.

import { make, write } from "./dom.js";

export class Rows {
  /** `cells`: a column's name, and its label on a phone. A column with a label holds numbers. */
  constructor(body, cells) {
    Object.assign(this, { body, cells, rows: new Map() });
  }

  /** Pairs of a key and the texts by column, in order. */
  show(pairs) {
    const wanted = new Set(pairs.map(([key]) => key));
    for (const [key, row] of this.rows) {
      if (wanted.has(key)) continue;
      row.element.remove();
      this.rows.delete(key);
    }
    pairs.forEach(([key, texts], index) => {
      const row = this.rowOf(key);
      for (const name of Object.keys(this.cells)) write(row[name], texts[name]);
      if (this.body.children[index] !== row.element) this.body.insertBefore(row.element, this.body.children[index] ?? null);
    });
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
