/** One answer with what was measured of it. */

import { Answer } from "./answer.js";
import { Histogram } from "./histogram.js";

const UNKNOWN = "–";
const milliseconds = (value) => `${Math.round(value).toLocaleString("en")} ms`;

export class Pane {
  /**
   * @param {HTMLTemplateElement} template
   * @param {string} title
   * @param {{num_layers: number, exit_layers: number[]}} model
   */
  constructor(template, title, model) {
    this.title = title;
    this.numLayers = model.num_layers;
    this.element = template.content.firstElementChild.cloneNode(true);
    const part = (selector) => this.element.querySelector(selector);
    const layers = [...new Set([...model.exit_layers, model.num_layers])].sort((a, b) => a - b);
    this.element.ariaLabel = title;
    part("h2").textContent = title;
    part(".answer").ariaLabel = `Tokens and their layers, ${title}`;
    this.list = part(".answer");
    this.plain = part(".plain");
    this.statusLine = part(".status");
    this.facts = new Map([...this.element.querySelectorAll("[data-fact]")].map((each) => [each.dataset.fact, each]));
    this.histogram = new Histogram(part("tbody"), layers, this.numLayers);
    const point = (pointed) => this.histogram.point(pointed);
    this.answer = new Answer(this.list, part(".readout"), this.numLayers, point);
    this.layers = [];
    this.told = {}; // of the last chunk: what the server counted itself
    this.finishReason = null;
    for (const each of this.facts.values()) each.textContent = UNKNOWN;
    this.#status("waiting");
  }

  /** The request leaves now. */
  start() {
    this.started = performance.now();
    this.list.ariaBusy = "true";
  }

  /** One chunk of the stream. */
  take(chunk) {
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const layers = choice.early_exit?.exit_layers ?? [];
    const text = choice.text ?? "";
    if (this.status === "waiting" && (text || layers.length)) {
      this.#status("running");
      this.#fact("first", milliseconds(performance.now() - this.started));
    }
    this.layers.push(...layers);
    this.answer.add(text, layers);
    this.histogram.add(layers);
    if (choice.finish_reason) {
      this.finishReason = choice.finish_reason;
      this.told = choice.early_exit ?? {};
    }
    this.#count();
  }

  /** Nothing follows. Status: finished, cancelled or failed. */
  end(status) {
    this.element.classList.toggle("nothing", status === "failed" && this.status === "waiting");
    this.#status(status);
    this.#fact("all", milliseconds(performance.now() - this.started));
    this.answer.end(this.finishReason === "stop");
    this.list.ariaBusy = "false";
    this.plain.textContent = this.answer.text;
    if (typeof this.told.certified === "boolean") {
      this.#fact("certified", this.told.certified ? "yes" : "no");
      this.facts.get("certified").dataset.certified = this.told.certified;
    }
  }

  /** All of it in a sentence or two, for those who do not see it. */
  get summary() {
    const fact = (name) => this.facts.get(name).textContent;
    const parts = [`${fact("tokens")} tokens`, `mean exit layer ${fact("mean")}`, `certified: ${fact("certified")}`];
    return `${this.title}, ${this.status}: ${this.answer.text} — ${parts.join(", ")}.`;
  }

  #count() {
    const tokens = this.told.tokens ?? this.layers.length;
    const mean = this.told.mean_exit_layer ?? this.layers.reduce((sum, layer) => sum + layer, 0) / this.layers.length;
    const skipped = this.told.layers_skipped ?? 1 - mean / this.numLayers;
    this.#fact("tokens", String(tokens));
    if (tokens && Number.isFinite(mean)) {
      this.#fact("mean", `${mean.toFixed(2)} of ${this.numLayers}`);
      this.#fact("skipped", `${(100 * skipped).toFixed(1)} %`);
    }
  }

  #fact(name, text) {
    this.facts.get(name).textContent = text;
  }

  #status(status) {
    this.status = status;
    this.statusLine.textContent = status;
    this.statusLine.dataset.status = status;
  }
}
