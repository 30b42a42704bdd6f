/** How deep the answer may stop: the certified tolerances of a model as stops of a slider, full depth leftmost. */

const CONSISTENCIES = ["risk", "textual"];
const LABELLED = 9; // stops that have room for a label each
const MEANS = {
  risk: "quality against the reference is on average at most # below full depth's",
  textual: "the text differs on average by at most # from full depth's",
};

export class Depth {
  /**
   * @param {{slider: HTMLInputElement, stops: HTMLElement, says: HTMLElement, choice: HTMLFieldSetElement}} parts
   * @param {() => void} onChange
   */
  constructor(parts, onChange) {
    Object.assign(this, parts);
    this.onChange = onChange;
    this.slider.addEventListener("input", () => this.#tell());
    this.choice.addEventListener("change", (event) => this.#switch(event.target.value));
  }

  /** Offer what a model is certified for; the server's default is chosen, else the most careful tolerance. */
  show(earlyExit) {
    this.numLayers = earlyExit.num_layers;
    this.tolerances = new Map();
    for (const name of CONSISTENCIES) {
      const values = [...(earlyExit.tolerances?.[name] ?? [])].sort((a, b) => a - b);
      if (values.length) this.tolerances.set(name, values);
    }
    this.choice.hidden = this.tolerances.size < 2;
    const preferred = earlyExit.default_consistency;
    const first = this.tolerances.keys().next().value ?? "risk";
    this.consistency = this.tolerances.has(preferred) ? preferred : first;
    for (const radio of this.choice.querySelectorAll("input")) radio.checked = radio.value === this.consistency;
    const byDefault = this.consistency === preferred ? earlyExit.default_tolerance : null;
    this.#fill(this.values.includes(byDefault) ? byDefault : (this.values[0] ?? null));
  }

  get values() {
    return this.tolerances.get(this.consistency) ?? [];
  }

  /** The tolerance chosen; null at full depth. */
  get tolerance() {
    return this.values[this.slider.valueAsNumber - 1] ?? null;
  }

  /** What a request sends as its early_exit. */
  get asked() {
    if (this.tolerance === null) return { policy: "full", layers: true };
    return { tolerance: this.tolerance, consistency: this.consistency, layers: true };
  }

  get title() {
    return this.tolerance === null ? "Full depth" : `Early exit, ${this.consistency} tolerance ${this.tolerance}`;
  }

  /** The same tolerance of the other consistency, or the nearest more careful one. */
  #switch(consistency) {
    const before = this.tolerance ?? 0;
    this.consistency = consistency;
    this.#fill(this.values.findLast((value) => value <= before) ?? null);
  }

  #fill(tolerance) {
    const last = this.values.length;
    this.slider.max = last;
    this.slider.value = this.values.indexOf(tolerance) + 1;
    this.slider.disabled = !last;
    this.stops.replaceChildren();
    ["full", ...this.values].forEach((value, i) => {
      const stop = document.createElement("span");
      stop.textContent = last < LABELLED || i === 0 || i === last ? value : "";
      stop.style.setProperty("--at", last ? i / last : 0);
      this.stops.append(stop);
    });
    this.#tell();
  }

  #tell() {
    const chosen = this.tolerance;
    [...this.stops.children].forEach((stop, i) => stop.classList.toggle("chosen", i === this.slider.valueAsNumber));
    this.slider.ariaValueText = chosen === null ? "full depth" : `${chosen}, ${this.consistency}`;
    if (!this.values.length) {
      this.says.textContent = "This model is certified for no tolerance as it is served: every token runs all layers.";
    } else if (chosen === null) {
      this.says.textContent = `Full depth: every token runs all ${this.numLayers} layers.`;
    } else {
      const means = MEANS[this.consistency].replace("#", chosen);
      this.says.textContent = `Certified for texts like those it was calibrated on: ${means}.`;
    }
    this.onChange();
  }
}
