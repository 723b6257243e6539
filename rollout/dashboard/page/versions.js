// Weight versions over time, the refreshes that brought them, and the update that is open.

import { $, button, clip, empty, h, list, meter, put, s, table } from "./dom.js";
import { bytes, clock, seconds, whole } from "./numbers.js";
import { post } from "./connection.js";
import { isRefresh, shownSamples, store } from "./store.js";
import { LEFT, TOP, frame, timeAxis, zoomable } from "./svg_time.js";

const KEYS = [
  ["box c-three", "staging, steps go on"], ["box c-two", "staging, steps held"], ["box c-bad", "stall of the commit, or dropped"],
  ["rule c-three", "in the charts: refresh"], ["rule c-two", "experts moved"], ["strip c-two", "many in a row"], ["box c-shade", "paused"],
];
const OUTCOMES = { committed: ["good", "committed"], aborted: ["bad", "aborted"], lost: ["bad", "lost"] };

// Labels of epochs, as far as they are known.
function labels() {
  const found = new Map(store.data.state.versions);
  for (const one of store.history.updates) {
    if (one.weight_epoch !== null && !found.has(one.weight_epoch)) found.set(one.weight_epoch, one.weight_version);
  }
  return found;
}

export function drawVersions() {
  if (!$("chart-versions").clientWidth) return;
  const box = frame("chart-versions", 86), samples = shownSamples([box.start, box.end]), names = labels();
  const commits = new Map(store.history.updates.filter((one) => one.weight_epoch !== null && one.num_tensors).map((one) => [one.weight_epoch, one.ended_at]));
  const svg = s("svg", { width: box.width, height: box.height, role: "img", "aria-label": "Weight versions over time" });
  const runs = [];
  for (const one of samples) {
    if (runs.at(-1)?.epoch === one.weight_epoch) runs.at(-1).last = one.at;
    else runs.push({ epoch: one.weight_epoch, first: one.at, last: one.at });
  }
  const right = box.x(box.end), inside = (x) => Math.min(right, Math.max(LEFT, x));
  runs.forEach(({ epoch, first, last }, index) => {
    const next = runs[index + 1];
    const begin = inside(box.x(index ? commits.get(epoch) ?? first : first));
    const end = inside(box.x(next === undefined ? last : commits.get(next.epoch) ?? next.first));
    const label = names.get(epoch) ?? "?", width = Math.max(1.5, end - begin - 1);
    const bar = s("rect", { class: epoch % 2 ? "f-one" : "f-old", x: begin, width, y: TOP, height: 20, rx: 3 });
    bar.append(s("title", {}, `version ${label}, epoch ${epoch}`));
    svg.append(bar);
    if (width > 26) svg.append(s("text", { class: "on", x: begin + 6, y: TOP + 14 }, clip(label, Math.floor((width - 10) / 7))));
  });
  svg.append(s("text", { x: LEFT - 6, y: TOP + 14, "text-anchor": "end" }, "serves"),
    s("text", { x: LEFT - 6, y: TOP + 42, "text-anchor": "end" }, "update"));
  for (const one of store.history.updates) drawUpdate(svg, box, one);
  svg.append(...timeAxis(box));
  $("chart-versions").replaceChildren(zoomable(box, svg, TOP, box.bottom));
  put("legend-versions", 0, ...KEYS.map(([look, name]) => () => h("span", {}, h("i", { class: `key ${look}` }), name)));
}

function drawUpdate(svg, box, one) {
  const stall = one.ended_at - one.stall_s, begin = stall - one.staging_s, y = TOP + 30;
  if (one.ended_at < box.start || one.ended_at > box.end) return;
  const x = Math.max(LEFT, box.x(begin));
  const bar = s("rect", { class: one.steps_held ? "f-two" : "f-three", x, width: Math.max(1.5, box.x(stall) - x), y: y + 3, height: 10, rx: 2 });
  const end = s("rect", { class: "f-bad", x: box.x(stall), width: Math.max(2, box.x(one.ended_at) - box.x(stall)), y, height: 16 });
  const outcome = one.kind === "committed" ? `stall ${seconds(one.stall_s)}` : `${one.kind}: ${one.reason}`;
  const before = one.prepared_s === null ? "" : `${seconds(one.prepared_s)} before begin, `;
  const title = `${one.weight_version ?? "no label"}: ${before}staging ${seconds(one.staging_s)}, ${outcome}`;
  bar.append(s("title", {}, title));
  end.append(s("title", {}, title));
  svg.append(bar, end);
  if (one.kind !== "committed") svg.append(s("text", { class: "strong", x: box.x(one.ended_at) + 4, y: y + 12 }, "✕"));
}

// As its sender sees it, but for the time between two calls: its own work before begin, then staging and commit.
const wholeTime = (one) => (one.prepared_s ?? 0) + one.staging_s + one.stall_s;

export function drawUpdates() {
  const rows = [...store.history.updates].reverse();
  put("updates", rows, () => {
    if (!rows.length) return empty("No refresh yet. The server started with the version it serves.");
    return table([
      ["Version", (one) => one.weight_version ?? "–", "name"], ["Ended", (one) => clock(one.ended_at)],
      ["Outcome", (one) => h("span", { class: OUTCOMES[one.kind][0] }, isRefresh(one) || one.kind !== "committed" ? OUTCOMES[one.kind][1] : "renamed")],
      ["Whole time", (one) => seconds(wholeTime(one)), "number"],
      ["Before begin", (one) => one.prepared_s === null ? "–" : seconds(one.prepared_s), "number"],
      ["Staging", (one) => seconds(one.staging_s) + (one.steps_held ? ", steps held" : ""), "number"],
      ["of it receiving", (one) => seconds(one.receiving_s), "number"],
      ["Stall", (one) => one.kind === "committed" ? seconds(one.stall_s) : "–", "number"],
      ["Tensors", (one) => whole(one.num_tensors), "number"], ["Size", (one) => bytes(one.num_bytes), "number"],
      ["Reason", (one) => one.reason ?? "", "text"],
    ], rows);
  });
}

export function drawUpdateUnderWay() {
  const update = store.data.state.weight_update;
  $("card-update").hidden = !update.open && !update.last_failure;
  put("update", [update, store.data.state.weight_epoch], () => {
    if (!update.open) {
      const last = update.last_failure;
      return h("div", {}, empty("No weight update is open."),
        last ? h("p", {}, h("span", { class: "bad" }, "The last one failed"), ` at ${clock(last.time)}: ${last.reason}`) : null);
    }
    const all = update.received + update.missing, isEndless = update.lease_s === null || update.lease_left_s === null;
    return h("div", {}, list([
      ["Version", update.weight_version ?? "not named yet"], ["Update", update.update_id ?? "–"],
      ["State", update.failed ? h("span", { class: "bad" }, "failed: " + update.failed) : update.state + (update.implicit ? ", without begin and end" : "")],
      ["Coverage", `${update.coverage}, staged ${update.staging}`],
      ["Tensors", h("div", {}, `${whole(update.received)} of ${whole(all)}, ${bytes(update.num_bytes)}`, meter(all ? update.received / all : 0))],
      ["Lease", isEndless ? "never ends" : h("div", {}, `${seconds(Math.max(0, update.lease_left_s))} left of ${seconds(update.lease_s)}`,
        meter(update.lease_left_s / update.lease_s, 0.2))],
    ]), h("div", { class: "buttons" }, button("Abort this update", () =>
      post("abort_weight_update", update.update_id === null ? {} : { update_id: update.update_id }), "Discard what was sent?")));
  });
}
