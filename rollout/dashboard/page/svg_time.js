// The time axis and the cursor of drawings that are no charts of uPlot.

import { $, s } from "./dom.js";
import { clock } from "./numbers.js";
import { shownTime, store } from "./store.js";
import { zoomTo } from "./time_chart.js";

export const LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 20;

export function frame(host, height) {
  const width = Math.max(220, $(host).clientWidth), [start, end] = shownTime();
  return {
    host, width, height, start, end, bottom: height - BOTTOM,
    x: (at) => LEFT + (width - LEFT - RIGHT) * (at - start) / (end - start),
    at: (x) => start + (end - start) * (x - LEFT) / (width - LEFT - RIGHT),
  };
}

export function timeAxis(box) {
  const most = Math.max(1, Math.floor((box.width - LEFT - RIGHT) / 84)), found = [];
  const step = [5, 10, 15, 30, 60, 120, 180, 300, 600, 900].find((one) => (box.end - box.start) / one <= most) ?? 1800;
  for (let at = Math.ceil(box.start / step) * step; at <= box.end; at += step) {
    const x = box.x(at);
    found.push(s("line", { class: "axis", x1: x, x2: x, y1: box.bottom, y2: box.bottom + 4 }));
    if (x > LEFT + 4 && x < box.width - 28) {
      found.push(s("text", { x, y: box.bottom + 15, "text-anchor": "middle" }, clock(at)));
    }
  }
  return found;
}

let drag = null;  // {host, at}: the drawing and the time at which one began; the drawing is made anew meanwhile

// Dragging zooms, and a double click shows all again, as in the charts.
export function zoomable(box, svg, y1, y2) {
  const band = s("rect", { class: "band", y: y1, height: y2 - y1, width: 0 });
  const place = (event) => Math.min(box.width - RIGHT, Math.max(LEFT, event.clientX - svg.getBoundingClientRect().left));
  const isDragged = () => drag !== null && drag.host === box.host;
  svg.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button === 0) drag = { host: box.host, at: box.at(place(event)) };
  });
  svg.addEventListener("pointermove", (event) => {
    if (!isDragged()) return;
    const x = Math.max(LEFT, box.x(drag.at));
    band.setAttribute("x", Math.min(x, place(event)));
    band.setAttribute("width", Math.abs(place(event) - x));
  });
  svg.addEventListener("pointerleave", () => {
    if (svg.isConnected) drag = null;
    band.setAttribute("width", 0);
  });
  svg.addEventListener("pointerup", (event) => {
    if (!isDragged()) return;
    const range = [drag.at, box.at(place(event))].sort((a, b) => a - b);
    const isLong = Math.abs(place(event) - box.x(drag.at)) >= 6 && range[1] - range[0] >= 2;
    drag = null;
    if (isLong) zoomTo(range);
  });
  svg.addEventListener("dblclick", () => { if (store.zoom !== null) zoomTo(null); });
  svg.append(band);
  return svg;
}
