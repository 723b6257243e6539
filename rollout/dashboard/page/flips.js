// Routes that a refresh flips, measured on one text, and the drift of the traffic's loads.

import { button, empty, h, put, s, table, text } from "./dom.js";
import { percent, whole } from "./numbers.js";
import { post } from "./connection.js";
import { store } from "./store.js";

export function drawFlips() {
  const layers = store.data.server.moe_layer_ids, rows = [...store.history.flips].reverse(), tokens = store.data.probe_tokens;
  text("flips-note", !layers.length ? "This model has no experts." : tokens === null && !rows.length ? ""
    : "Share of (token, layer) pairs of one text whose set of experts changed from one version to the next, the text scored again under each."
      + (tokens === null ? " The text was taken away." : ` The text has ${whole(tokens)} tokens.`));
  put("flips", [rows, tokens, layers], () => {
    if (!layers.length) return h("span");
    const stop = tokens === null ? null : h("div", { class: "buttons" }, button("Measure no longer", () => post("dashboard/route_probe", {})));
    if (!rows.length) {
      return h("div", {}, empty(tokens === null ? "No text is set to measure with. It is scored after each refresh."
        : "No refresh yet since the text was set."), tokens === null ? probeForm() : stop);
    }
    const most = rows.flatMap((one) => one.by_layer).reduce((best, value) => Math.max(best, value), 0.02);
    return h("div", {}, table([
      ["Flipped", (one) => percent(one.share, 2), "number"], ["By layer", (one) => strip(one.by_layer, layers, most)],
      ["From", (one) => one.from_version, "brief"], ["To", (one) => one.to_version, "brief"],
    ], rows), h("p", { class: "quiet" }, "0", h("i", { class: "ramp flips" }), percent(most)), tokens === null ? probeForm() : stop);
  });
  const drift = store.data.state.experts?.drift ?? null;
  text("drift", drift === null ? "" : driftText(drift));
}

function probeForm() {
  const field = h("input", { type: "text", placeholder: "a text of some hundred words", "aria-label": "Text to measure with" });
  const form = h("form", { class: "inline" }, field, h("button", { type: "submit" }, "Measure with it"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) post("dashboard/route_probe", { text: field.value });
  });
  return form;
}

function strip(shares, layers, most) {
  const cell = Math.max(4, Math.min(16, Math.floor(150 / shares.length)));
  const svg = s("svg", { width: cell * shares.length, height: 15, role: "img", "aria-label": shares.map((share) => percent(share)).join(", ") });
  shares.forEach((share, index) => {
    const tint = s("rect", { class: "f-one", x: cell * index, y: 1, width: cell - 1, height: 13, opacity: (share / most).toFixed(3) });
    tint.append(s("title", {}, `layer ${layers[index]}: ${percent(share, 2)}`));
    svg.append(s("rect", { class: "f-even", x: cell * index, y: 1, width: cell - 1, height: 13 }), tint);
  });
  return svg;
}

function mean(values) {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function driftText(drift) {
  const measured = mean(drift.total_variation), chance = mean(drift.expected_by_chance);
  if (measured === null || chance === null) return "";
  return `Load drift of the traffic from ${drift.from_weight_version} to ${drift.to_weight_version}: experts' shares differ by ${percent(measured)} `
    + `(total variation, mean over layers); ${percent(chance)} would be chance alone.`;
}
