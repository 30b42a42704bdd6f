/** How many tokens left at each layer: a table whose cells are drawn as bars. */

import { shade } from "./shade.js";

export class Histogram {
  /**
   * @param {HTMLTableSectionElement} body
   * @param {number[]} layers the rows, ascending.
   * @param {number} numLayers
   */
  constructor(body, layers, numLayers) {
    this.body = body;
    this.numLayers = numLayers;
    this.counts = new Map();
    this.rows = new Map();
    for (const layer of layers) this.#row(layer);
  }

  add(layers) {
    for (const layer of layers) {
      if (!this.rows.has(layer)) this.#row(layer);
      this.counts.set(layer, this.counts.get(layer) + 1);
    }
    const most = Math.max(1, ...this.counts.values());
    for (const [layer, { bar, count }] of this.rows) {
      count.textContent = this.counts.get(layer);
      bar.style.setProperty("--share", this.counts.get(layer) / most);
    }
  }

  /** Mark the rows of these layers. */
  point(layers) {
    for (const [layer, { row }] of this.rows) row.classList.toggle("pointed", layers.includes(layer));
  }

  #row(layer) {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    const cell = document.createElement("td");
    const bar = document.createElement("span");
    const count = document.createElement("span");
    head.scope = "row";
    head.textContent = layer;
    shade(head, [layer], this.numLayers);
    shade(bar, [layer], this.numLayers);
    bar.classList.add("bar");
    count.textContent = "0";
    cell.append(bar, count);
    row.append(head, cell);
    const after = [...this.rows.keys()].filter((each) => each > layer).sort((a, b) => a - b)[0];
    this.body.insertBefore(row, this.rows.get(after)?.row ?? null);
    this.counts.set(layer, 0);
    this.rows.set(layer, { row, bar, count });
  }
}
