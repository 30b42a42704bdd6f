/** An answer's tokens, each shaded by the layer that it left at. */

import { named, shade } from "./shade.js";

const HINT = "Point at a token or use the arrow keys to see its layer.";

/**
 * One list box whose options are the tokens: a single stop of the tab key, arrows move within it.
 */
export class Answer {
  /**
   * @param {HTMLElement} list the list box.
   * @param {HTMLElement} readout where the layer of the token in question is told.
   * @param {number} numLayers
   * @param {(layers: number[]) => void} onPoint called with the layers of the token in question, or none.
   */
  constructor(list, readout, numLayers, onPoint) {
    this.list = list;
    this.readout = readout;
    this.numLayers = numLayers;
    this.onPoint = onPoint;
    this.text = "";
    this.silent = []; // layers of tokens whose text has not come yet
    list.addEventListener("keydown", (event) => this.#move(event));
    list.addEventListener("focusin", (event) => this.#choose(event.target));
    list.addEventListener("focusout", () => this.#point(null));
    list.addEventListener("pointerover", (event) => this.#point(event.target));
    list.addEventListener("pointerleave", () => this.#point(document.activeElement));
  }

  /** What became final of the text, and the layers of the tokens that came with it. */
  add(text, layers) {
    this.text += text;
    const waiting = [...this.silent, ...layers];
    if (text === "") {
      this.silent = waiting;
      return;
    }
    this.silent = [];
    const words = text.match(/\s*\S+(?:\s+$)?/g) ?? [];
    if (words.length && words.length === waiting.length) {
      words.forEach((word, i) => this.#append(word, [waiting[i]]));
    } else {
      this.#append(text, waiting);
    }
  }

  /** Nothing follows: tokens without a text of their own, such as the one that ends an answer, get a mark. */
  end(finished) {
    if (this.silent.length) this.#append("", this.silent, finished ? "end" : "no text");
    this.silent = [];
    if (!this.readout.textContent && this.list.childElementCount) this.readout.textContent = HINT;
  }

  #append(text, layers, mark = "") {
    const token = document.createElement("span");
    const words = text.trim();
    const before = words ? text.slice(0, text.indexOf(words)) : "";
    token.textContent = text.slice(before.length);
    token.role = "option";
    token.className = "token";
    token.tabIndex = this.list.childElementCount ? -1 : 0;
    token.title = named(layers, this.numLayers);
    token.ariaLabel = `${words || mark || "blank"}, ${token.title}`;
    token.ariaSelected = "false";
    token.dataset.layers = layers.join(" ");
    if (mark) token.dataset.mark = mark;
    if (layers.length) shade(token, layers, this.numLayers);
    this.list.append(before, token);
  }

  #move(event) {
    const tokens = [...this.list.children];
    const at = tokens.indexOf(document.activeElement);
    const steps = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: Infinity };
    const to = steps[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey || !tokens.length) return;
    event.preventDefault();
    tokens[Math.max(0, Math.min(to, tokens.length - 1))].focus();
  }

  #choose(target) {
    for (const token of this.list.children) {
      token.ariaSelected = String(token === target);
      token.tabIndex = token === target ? 0 : -1;
    }
    this.#point(target);
  }

  #point(target) {
    const token = this.list.contains(target) ? target.closest(".token") : null;
    const layers = token?.dataset.layers ? token.dataset.layers.split(" ").map(Number) : [];
    this.onPoint(layers);
    this.readout.textContent = token?.ariaLabel ?? HINT;
  }
}
