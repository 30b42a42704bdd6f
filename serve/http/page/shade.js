/** The shade of a layer: a scale from shallow to deep whose lightness runs one way only (page.css has its two ends). */

/** Where a layer lies on the scale, as a percentage: 1 is shallow, the last is deep. */
export const depth = (layer, numLayers) => `${((100 * (layer - 1)) / Math.max(1, numLayers - 1)).toFixed(1)}%`;

/** Shade an element by one layer, or in stripes by several. */
export function shade(element, layers, numLayers) {
  element.classList.add("shaded");
  element.style.setProperty("--depth", depth(layers[0], numLayers));
  if (layers.length > 1) {
    const stripes = layers.map((layer, i) => {
      const mix = `color-mix(in oklch, var(--shallow), var(--deep) ${depth(layer, numLayers)})`;
      return `${mix} ${(100 * i) / layers.length}% ${(100 * (i + 1)) / layers.length}%`;
    });
    element.style.setProperty("background-image", `linear-gradient(to right, ${stripes.join(", ")})`);
  }
}

/** "layer 3 of 8", "layers 3, 1 of 8". */
export function named(layers, numLayers) {
  if (!layers.length) return "layer not told";
  return `layer${layers.length > 1 ? "s" : ""} ${layers.join(", ")} of ${numLayers}`;
}
