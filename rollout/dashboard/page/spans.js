// The buttons that choose how much time is shown.

import { $, h } from "./dom.js";
import { SPANS, store } from "./store.js";
import { onZoom, zoomTo } from "./time_chart.js";

export function offerSpans(draw) {
  const drawAgain = () => {
    $("reset").hidden = store.zoom === null;
    draw();
  };
  for (const [size, name] of SPANS) {
    const made = h("button", { type: "button", "aria-pressed": String(size === store.span) }, name);
    made.addEventListener("click", () => {
      store.span = size;
      store.zoom = null;
      for (const other of $("spans").children) other.setAttribute("aria-pressed", String(other === made));
      drawAgain();
    });
    $("spans").append(made);
  }
  $("reset").addEventListener("click", () => zoomTo(null));
  onZoom(drawAgain);
  window.addEventListener("resize", drawAgain);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);
}
