// Load of ranks and of experts, balance over time, rebalances.

import { $, button, clip, empty, h, put, s, table, text } from "./dom.js";
import { bytes, clock, seconds, whole } from "./numbers.js";
import { get, post } from "./connection.js";
import { NARROW, lastSample, moves, shownSamples, store } from "./store.js";
import { BOTTOM, LEFT, RIGHT, frame, timeAxis, zoomable } from "./svg_time.js";
import { marksOf } from "./time_chart.js";

const EXPERTS_MS = 5000;
let loadsByExpert = null, askedAt = -EXPERTS_MS;

export function forgetExperts() { loadsByExpert = null; }

// Ask for the loads by expert, every five seconds while they are looked at.
export function followExperts() {
  const { experts } = store.data.state;
  if (experts === null || !experts.num_passes || !$("chart-experts").clientWidth || performance.now() - askedAt < EXPERTS_MS) return;
  askedAt = performance.now();
  get("dashboard/experts").then((answer) => {
    loadsByExpert = answer;
    if (store.data !== null) drawExperts();
  }, () => {});
}

const rowHeight = (layers) => layers.length > 24 ? 9 : 19;
const isNamed = (layers, index) => layers.length <= 24 || index % 4 === 0;

export function drawLoads() {
  const { experts, eplb } = store.data.state, layers = store.data.server.moe_layer_ids;
  const why = !layers.length ? "This model has no experts."
    : experts === null ? "Expert loads are not recorded." : experts.num_passes ? "" : "No forward pass was recorded yet.";
  $("experts-grid").classList.toggle("unknown", why !== "");
  text("title-loads", why ? "" : `Load of each rank, last ${experts.num_passes} forward passes${experts.recording ? "" : " (recording has stopped)"}`);
  text("title-balance", why ? "" : `Balance over time, ${experts.rank_loads.every((ranks) => ranks.length === 1) ? "of expert slots (one rank)" : "of ranks"}`);
  put("expert-buttons", [layers.length > 0, experts?.recording ?? false, eplb !== null], () => h("div", { class: "buttons" },
    !layers.length ? null : experts?.recording ? button("Stop recording", () => post("stop_expert_distribution_record", {}))
      : button("Record loads", () => post("start_expert_distribution_record", {})),
    eplb === null ? null : button("Rebalance now", () => post("eplb_rebalance", {}), "Move experts now?")));
  const width = $("chart-loads").clientWidth;
  if (why) {
    put("chart-loads", why, () => empty(why));
    put("legend-loads", why);
    return;
  }
  put("chart-loads", [experts.rank_loads, width, layers], () => loads(experts.rank_loads, layers, width));
  put("legend-loads", [layers.length], () => h("span", {}, "below even", h("i", { class: "ramp two-sided" }), "above even (twice the mean or more)"));
}

// Loads [L][G] over their layer's mean: 1 is even.
function loads(rankLoads, layers, width) {
  const left = 62, top = 16, ranks = rankLoads[0].length, high = rowHeight(layers);
  const cell = Math.min(110, (Math.max(220, width) - left - 4) / ranks);
  const svg = s("svg", { width: left + cell * ranks + 4, height: top + high * rankLoads.length + 4, role: "img", "aria-label": "Load by layer and rank" });
  for (let rank = 0; rank < ranks; rank++) {
    svg.append(s("text", { x: left + cell * (rank + 0.5), y: 11, "text-anchor": "middle" }, cell > 44 ? `rank ${rank}` : rank));
  }
  rankLoads.forEach((tokens, index) => {
    const y = top + high * index;
    if (isNamed(layers, index)) {
      svg.append(s("text", { x: left - 6, y: y + high / 2 + 4, "text-anchor": "end" }, `layer ${layers[index]}`));
    }
    shades(tokens).forEach(([value, ratio], rank) => {
      const x = left + cell * rank;
      svg.append(...tile(x, y, cell - 1, high - 1, ratio, `layer ${layers[index]}, rank ${rank}: ${whole(value)} tokens, ${ratio.toFixed(2)} times the mean`));
      if (cell > 34 && high > 10) {
        svg.append(s("text", { class: "strong", x: x + cell / 2, y: y + 13, "text-anchor": "middle", "pointer-events": "none" }, ratio.toFixed(2)));
      }
    });
  });
  return svg;
}

function shades(tokens) {
  const mean = tokens.reduce((sum, value) => sum + value, 0) / tokens.length;
  return tokens.map((value) => [value, mean ? value / mean : 1]);
}

function tile(x, y, width, height, ratio, words) {
  const tint = s("rect", { class: ratio >= 1 ? "f-hot" : "f-cold", x, y, width, height, opacity: (0.8 * Math.min(1, Math.abs(ratio - 1))).toFixed(3) });
  tint.append(s("title", {}, words));
  return [s("rect", { class: "f-even", x, y, width, height }), tint];
}

// A tile an expert, busiest first in each layer: the shape of the load, and the ids of the busiest.
export function drawExperts() {
  const layers = store.data.server.moe_layer_ids, found = loadsByExpert, width = $("chart-experts").clientWidth;
  if (!layers.length || store.data.state.experts === null || found === null || !width) {
    text("title-experts", "");
    put("chart-experts", 0);
    return;
  }
  text("title-experts", `Load of each expert, last ${whole(found.num_passes)} forward passes, busiest first`);
  put("chart-experts", [found, width], () => {
    const left = 62, experts = found.expert_loads[0].length, high = rowHeight(layers);
    const cell = (Math.max(220, width) - left - 4) / experts, gap = cell > 4 ? 1 : 0;
    const svg = s("svg", { width, height: high * layers.length + 4, role: "img", "aria-label": "Load by layer and expert" });
    found.expert_loads.forEach((tokens, index) => {
      const y = high * index, sorted = shades(tokens).map(([value, ratio], id) => [value, ratio, id]).sort((a, b) => b[0] - a[0]);
      if (isNamed(layers, index)) svg.append(s("text", { x: left - 6, y: y + high / 2 + 4, "text-anchor": "end" }, `layer ${layers[index]}`));
      sorted.forEach(([value, ratio, id], place) => {
        svg.append(...tile(left + cell * place, y, Math.max(0.5, cell - gap), high - 1, ratio,
          `layer ${layers[index]}, expert ${id}: ${whole(value)} tokens, ${ratio.toFixed(2)} times the mean`));
        if (cell > 24 && high > 10) {
          svg.append(s("text", { class: "strong", x: left + cell * (place + 0.5), y: y + 13, "text-anchor": "middle", "pointer-events": "none" }, id));
        }
      });
    });
    return svg;
  });
}

// Means of neighbours, so that no column is thinner than two pixels.
function columns(samples, most) {
  if (samples.length <= most) return samples.map((one) => ({ at: one.at, balance: one.balance }));
  const size = Math.ceil(samples.length / most), found = [];
  for (let from = 0; from < samples.length; from += size) {
    const part = samples.slice(from, from + size);
    const balance = part[0].balance.map((_, index) => {
      const known = part.map((one) => one.balance[index]).filter((value) => value !== null);
      return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
    });
    found.push({ at: part.at(-1).at, balance });
  }
  return found;
}

// A column a sample, a row a layer: how far the busiest is above the mean.
export function drawBalance() {
  const host = $("chart-balance"), layers = store.data.server.moe_layer_ids;
  if (!host.clientWidth) return;
  const high = rowHeight(layers), top = 16, bottom = top + high * layers.length;
  const box = { ...frame("chart-balance", 0), bottom };
  const samples = columns(shownSamples([box.start, box.end]).filter((one) => one.balance !== null), (box.width - LEFT - RIGHT) / 2);
  if (!layers.length || store.data.state.experts === null || !samples.length) {
    host.replaceChildren();
    $("legend-balance").replaceChildren();
    return;
  }
  const known = samples.flatMap((one) => one.balance).filter((value) => value !== null);
  const least = known.reduce((best, value) => Math.min(best, value), 0.9);
  const svg = s("svg", { width: box.width, height: bottom + BOTTOM, role: "img", "aria-label": "Balance by layer over time" });
  layers.forEach((layer, index) => {
    const y = top + high * index;
    svg.append(s("rect", { class: "f-even", x: LEFT, width: box.width - LEFT - RIGHT, y, height: high - 1, opacity: 0.45 }));
    if (isNamed(layers, index)) svg.append(s("text", { x: LEFT - 6, y: y + high / 2 + 4, "text-anchor": "end" }, layer));
    svg.append(...runs(box, samples, index, least).map(([from, until, shade]) =>
      s("rect", { class: "f-hot", x: from, width: Math.max(0.5, until - from), y, height: high - 1, opacity: shade })));
  });
  svg.append(...marks(box, bottom), ...timeAxis(box));
  host.replaceChildren(zoomable(box, svg, top, bottom));
  const values = (lastSample()?.balance ?? []).filter((value) => value !== null);
  $("legend-balance").replaceChildren(
    h("span", {}, "even (1.00)", h("i", { class: "ramp one-sided" }), `mean over busiest ${least.toFixed(2)}`),
    h("span", {}, h("i", { class: "key rule c-three" }), "refresh"), h("span", {}, h("i", { class: "key rule c-two" }), "⇄ experts moved"),
    values.length ? h("span", {}, "now ", h("b", {}, (values.reduce((sum, value) => sum + value, 0) / values.length).toFixed(3)), ", least ", h("b", {}, Math.min(...values).toFixed(3))) : "");
}

// [from, until, shade]: neighbours of one shade are one rectangle.
function runs(box, samples, index, least) {
  const found = [];
  let before = null;
  for (const one of samples) {
    const value = one.balance[index], until = Math.min(box.width - RIGHT, box.x(one.at));
    const from = Math.max(LEFT, before === null || box.x(one.at) - box.x(before) > 14 ? box.x(one.at - 1) : box.x(before));
    const shade = value === null ? 0 : Math.round(20 * (1 - value) / (1 - least)) / 20, last = found.at(-1);
    if (last !== undefined && last[2] === shade && from - last[1] < 1) last[1] = until;
    else found.push([from, until, shade]);
    before = one.at;
  }
  return found.filter(([, , shade]) => shade > 0);
}

function marks(box, bottom) {
  const found = [];
  for (const { name, groups, title } of marksOf([box.start, box.end], box.width)) {
    for (const group of groups) {
      const x1 = box.x(group.first), x2 = box.x(group.last), isOne = group.events.length === 1;
      const mark = isOne ? s("line", { class: `mark c-${name}`, x1, x2: x1, y1: name === "three" ? 0 : 4, y2: bottom })
        : s("rect", { class: `strip c-${name}`, x: x1 - 1, width: x2 - x1 + 2, y: name === "three" ? 0 : 12, height: 3, rx: 1 });
      mark.append(s("title", {}, title(group.events)));
      found.push(mark);
    }
  }
  return found;
}

export function drawRebalances() {
  const { eplb } = store.data.state, rows = [...store.history.rebalances].reverse();
  const line = eplb === null ? (store.data.server.moe_layer_ids.length ? "Experts are not spread over ranks: nothing to rebalance." : "")
    : `Balancer: ${eplb.stuck ?? eplb.stage}, ${whole(eplb.num_evaluations)} evaluations.${eplb.reason ? " The last: " + clip(eplb.reason, window.innerWidth < NARROW ? 90 : 400) : ""}`;
  text("eplb", line);
  put("rebalances", [rows, eplb === null], () => {
    if (eplb === null) return h("span");
    if (!rows.length) return empty("No rebalance yet.");
    const balance = (value) => value?.toFixed(3) ?? "–", moved = (one, words) => moves(one) ? words : "–";
    return table([
      ["Rebalance", (one) => clock(one.ended_at)], ["Before", (one) => balance(one.balancedness_before), "number"],
      ["Predicted after", (one) => balance(one.balancedness_after), "number"],
      ["Measured after", (one) => one.balancedness_measured === null && one.number === rows[0].number ? "at the next check" : balance(one.balancedness_measured), "number"],
      ["Experts moved", (one) => moved(one, whole(moves(one))), "number"], ["Size", (one) => moved(one, bytes(one.num_bytes)), "number"],
      ["Time", (one) => moved(one, seconds(one.seconds)), "number"], ["Longest stall", (one) => moved(one, seconds(one.longest_chunk_s)), "number"],
      ["Result", result, "text"],
    ], withoutRepeats(rows));
  });
  text("rebalances-note", eplb === null || !rows.length ? "" : "Before, predicted and measured are of all tokens between two checks. "
    + "The balance over time is of 10 steps at a time, in which few tokens are never even.");
}

function result(one) {
  if (one.dropped !== null) return h("span", { class: "warn" }, `${one.chunks_done} of ${one.num_chunks} parts; ${one.dropped}`);
  const others = one.repeats > 1 ? `, ${one.repeats} times since ${clock(one.since)}` : "";
  return h("span", { class: "good" }, moves(one) ? "done" : `copies share tokens otherwise${others}`);
}

// Newest first.  Of changes in a row that moved no expert only the newest, with their number and the time of the first.
function withoutRepeats(rows) {
  const found = [];
  for (const one of rows) {
    const last = found.at(-1);
    if (last !== undefined && !moves(last) && !moves(one) && last.dropped === null && one.dropped === null) {
      [last.repeats, last.since] = [last.repeats + 1, one.ended_at];
    } else {
      found.push({ ...one, repeats: 1, since: one.ended_at });
    }
  }
  return found;
}
