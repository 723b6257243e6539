// The charts over time.

import { $, h } from "./dom.js";
import { bytes, percent, precise, seconds, short, whole } from "./numbers.js";
import { shownTime, store } from "./store.js";
import { charts, timeChart } from "./time_chart.js";

const rate = (value) => short(value) + " tok/s";
const perSecond = (value) => value.toFixed(value < 10 ? 2 : 0) + " /s";
const axisSeconds = (value) => value === 0 ? "0" : value >= 1 ? +value.toFixed(1) + " s" : +(1000 * value).toPrecision(3) + " ms";
const axisPercent = (value) => +(100 * value).toFixed(1) + " %";
const axisBytes = (value) => value === 0 ? "0" : bytes(value).replace(/\.0 /, " ");

function serving() {
  const { state } = store.data, pool = state.max_total_num_tokens, rows = state.num_state_rows;
  timeChart("throughput", [
    { name: "Generated", colour: "one", value: (one) => one.generated_per_s, area: true },
    { name: "Prefilled", colour: "two", value: (one) => one.prefilled_per_s },
  ], { most: 3, show: rate });
  timeChart("requests", [
    { name: "Running", colour: "one", value: (one) => one.running, area: true },
    { name: "Waiting", colour: "two", value: (one) => one.waiting },
  ], { most: 3, show: whole });
  const memory = [{
    name: "Tokens", colour: "one", value: (one) => one.used_tokens / pool, area: true,
    show: (value, one) => `${whole(one.used_tokens)} of ${whole(pool)} (${percent(value)})`,
  }];
  if (rows) {
    memory.push({
      name: "State rows and window pages", colour: "two", value: (one) => one.used_state_rows / rows,
      show: (value, one) => `${whole(one.used_state_rows)} of ${whole(rows)}`,
    });
  }
  timeChart("kv", memory, { most: 0.03, unit: axisPercent });
}

function latencies() {
  for (const [name, field] of [["first-token", "first_token_s"], ["per-token", "per_token_s"], ["latency", "latency_s"]]) {
    const line = (label, colour, place) => ({ name: label, colour, value: (one) => one[field]?.[place] ?? null });
    timeChart(name, [line("p50", "one", 0), line("p95", "two", 1), line("p99", "bad", 2)],
      { unit: axisSeconds, show: seconds, smooth: false, none: "no sample in the last minute" });
  }
}

function answers() {
  const age = (value) => value.toFixed(value % 1 ? 2 : 0);
  timeChart("staleness", [
    { name: "Returned, mean", colour: "one", value: (one) => one.age_returned?.[0] },
    { name: "oldest", colour: "two", value: (one) => one.age_returned?.[1] },
    { name: "Running, oldest", colour: "three", value: (one) => one.age_running?.[1] },
  ], { most: 1, show: age, zeroIsIdle: false, smooth: false, none: "no samples yet" });
  timeChart("logprob", [
    { name: "Log-probability", colour: "one", value: (one) => one.logprob },
  ], { free: true, unit: precise, show: (value) => value.toFixed(3), none: "no request asked for log-probabilities" });
  timeChart("entropy", [
    { name: "Entropy", colour: "two", value: (one) => one.entropy },
  ], { free: true, unit: precise, show: (value) => value.toFixed(3) + " nats", none: "not known of these samples" });
  const prompted = (one) => one.prefilled_per_s + one.reused_per_s;
  timeChart("prefix", [
    { name: "Hit rate", colour: "one", area: true, value: (one) => prompted(one) > 0 ? one.reused_per_s / prompted(one) : null },
  ], { most: 0.1, unit: axisPercent, show: percent });
  timeChart("ends", [
    { name: "Ended", colour: "one", value: (one) => one.finished_per_s },
    { name: "Aborted", colour: "bad", value: (one) => one.aborted_per_s },
    { name: "Retracted", colour: "two", value: (one) => one.retracted_per_s },
  ], { show: perSecond });
}

function machine() {
  timeChart("memory", [
    { name: "Engine", colour: "one", area: true, value: (one) => one.memory_bytes?.[1] },
    { name: "HTTP process", colour: "two", value: (one) => one.memory_bytes?.[0] },
  ], { unit: axisBytes, show: bytes, smooth: false, isBinary: true, none: "not known on this system" });
  timeChart("cpus", [
    { name: "Busy cores", colour: "one", area: true, value: (one) => one.cpus },
  ], { show: (value) => value.toFixed(2), none: "not known on this system" });
}

// A chart for each name that the trainer posts.
function trainer() {
  const reports = store.history.trainer, names = [...new Set(reports.flatMap((one) => Object.keys(one.values)))].sort();
  const host = $("trainer-charts");
  if (host.dataset.names !== JSON.stringify(names)) {
    host.dataset.names = JSON.stringify(names);
    for (const name of [...charts.keys()].filter((one) => one.startsWith("trainer-"))) {
      charts.get(name).plot?.destroy();
      charts.delete(name);
    }
    host.replaceChildren(...names.map((name, index) => h("section", { class: "card" }, h("h3", {}, name),
      h("div", { class: "legend", id: `legend-trainer-${index}` }), h("div", { class: "chart", id: `chart-trainer-${index}` }))));
  }
  $("trainer-note").hidden = names.length > 0;
  const [start, end] = shownTime();
  names.forEach((name, index) => {
    const places = reports.filter((one) => name in one.values && one.at >= start && one.at <= end);
    const shown = (value, one) => precise(value) + (one.step === null ? "" : `, step ${whole(one.step)}`);
    timeChart(`trainer-${index}`, [{ name: "", colour: "one", value: (one) => one.values[name], show: shown }],
      { free: true, unit: precise, smooth: false, events: false, dots: true, places, none: "no report in this time" });
  });
}

export function drawCharts() {
  serving();
  latencies();
  answers();
  machine();
  trainer();
}
