// Several servers on one page.  The process that serves it asks them.

import { get } from "./connection.js";
import { $, h, put, table, text, tiles } from "./dom.js";
import { clock, percent, seconds, short, upTime, whole } from "./numbers.js";
import { offerSpans } from "./spans.js";
import { gateOf } from "./state.js";
import { store } from "./store.js";
import { charts, timeChart } from "./time_chart.js";

const POLL_MS = 2000, MAX_LINES = 6, KEPT_S = 3600;
const COLOURS = ["one", "two", "three", "four", "bad", "quiet"];
let count = 0, timer = 0, isPolling = false;

// [class, words] of a server's state.
function status(one) {
  const { state, server } = one;
  if (one.trouble !== null) return ["bad", one.trouble];
  if (server.phase === "failed") return ["bad", server.failure ? "failed: " + server.failure : "failed"];
  if (one.unanswered) return ["bad", one.unanswered];
  const [colour, words] = gateOf(server.phase, state);
  return [colour, words === "serving" && state.weight_update.open ? "serving, update open" : words];
}

// The version that most servers serve.
function commonVersion(engines) {
  const counts = new Map();
  for (const one of engines) if (one.state !== null && one.trouble === null) counts.set(one.state.weight_version, (counts.get(one.state.weight_version) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1])[0]?.[0] ?? null;
}

function draw() {
  const { data } = store;
  if (data === null) return;
  const { engines } = data, alive = engines.filter((one) => one.trouble === null && one.state !== null);
  const common = commonVersion(engines), ahead = alive.filter((one) => one.state.weight_version !== common);
  const good = engines.filter((one) => status(one)[0] === "good").length, sum = (value) => alive.reduce((total, one) => total + value(one), 0);
  $("gate").className = `chip ${good === engines.length ? "good" : good ? "warn" : "bad"}`;
  text("gate", `${good} of ${engines.length} serve`);
  tiles([
    ["Servers", whole(engines.length)], ["Generated, tok/s", short(sum((one) => one.sample.generated_per_s ?? 0))],
    ["Running", whole(sum((one) => one.state.num_running_reqs))], ["Waiting", whole(sum((one) => one.state.num_waiting_reqs))],
    ["KV tokens in use", alive.length ? percent(sum((one) => one.state.num_used_tokens) / sum((one) => one.state.max_total_num_tokens)) : "–"],
    ["Version of most", common ?? "–"], ["On another version", whole(ahead.length)], ["Refused requests", whole(engines.reduce((total, one) => total + one.num_refusals, 0))],
  ]);
  drawRates(engines);
  drawEngines(engines, common);
}

function drawRates(engines) {
  const total = (one) => one.rates.some((rate) => rate !== null) ? one.rates.reduce((sum, rate) => sum + (rate ?? 0), 0) : null;
  const lines = engines.length === 1 || engines.length > MAX_LINES ? [{ name: "All servers", colour: "one", area: true, value: total }]
    : engines.map((one, index) => ({ name: one.url.replace(/^https?:\/\//, ""), colour: COLOURS[index], value: (row) => row.rates[index] }));
  timeChart("rates", lines, { most: 3, show: (value) => short(value) + " tok/s", events: false });
}

function drawEngines(engines, common) {
  const value = (one, show) => one.state === null || one.trouble !== null ? "–" : show(one.state, one.sample);
  put("engines", engines, () => table([
    ["Server", (one) => h("a", { href: `${one.url}/dashboard`, rel: "noreferrer", target: "_blank" }, one.url.replace(/^https?:\/\//, "")), "name"],
    ["State", (one) => h("span", { class: status(one)[0] }, status(one)[1]), "text"],
    ["Version", (one) => value(one, (state) => h("span", { class: state.weight_version === common ? null : "warn" }, state.weight_version)), "brief"],
    ["Generated", (one) => value(one, (_, sample) => short(sample.generated_per_s ?? 0) + " tok/s"), "number"],
    ["Running", (one) => value(one, (state) => whole(state.num_running_reqs)), "number"],
    ["Waiting", (one) => value(one, (state) => whole(state.num_waiting_reqs)), "number"],
    ["KV", (one) => value(one, (state) => percent(state.num_used_tokens / state.max_total_num_tokens)), "number"],
    ["First token, p95", (one) => value(one, (_, sample) => sample.first_token_s ? seconds(sample.first_token_s[1]) : "–"), "number"],
    ["Age returned", (one) => value(one, (_, sample) => sample.age_returned ? sample.age_returned[0].toFixed(2) : "–"), "number"],
    ["Refused", (one) => whole(one.num_refusals), "number"],
    ["Up", (one) => one.server.started_at && one.trouble === null ? upTime(store.data.now - one.server.started_at) : "–", "number"],
  ], engines));
}

async function poll() {
  clearTimeout(timer);
  if (isPolling || document.hidden) return;
  isPolling = true;
  try {
    const found = await get(`fleet/data?since=${count}`);
    const isOther = store.data !== null && store.data.started_at !== found.started_at;
    if (isOther) {
      count = 0;
      store.history.samples = [];
    } else {
      count = found.count;
      store.history.samples = [...store.history.samples, ...found.rows].filter((one) => one.at > found.now - KEPT_S);
    }
    store.data = { ...found, server: { started_at: found.started_at } };
    $("main").hidden = false;
    $("notice").hidden = true;
    document.body.classList.remove("stale");
    draw();
    text("live", `live · ${clock(found.now)}`);
  } catch (error) {
    $("notice").hidden = false;
    document.body.classList.add("stale");
    text("notice", `No answer from the process that serves this page: ${error.message}. Trying again.`);
    text("live", "disconnected");
  } finally {
    isPolling = false;
  }
  timer = setTimeout(poll, POLL_MS);
}

store.gapS = 12;
offerSpans(draw);
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
window.lockstep = { charts, store };
poll();
