// The server now: tiles, gates, what an operator may ask for, sessions, errors.

import { $, button, empty, h, list, put, table, text, tiles } from "./dom.js";
import { bytes, clock, percent, seconds, short, upTime, whole } from "./numbers.js";
import { get, post, trouble } from "./connection.js";
import { lastSample, store } from "./store.js";

const SESSIONS_MS = 5000;
let sessions = null, askedAt = -SESSIONS_MS;

export function forgetSessions() { sessions = null; }

export function drawTiles() {
  const { state, server, now } = store.data, last = lastSample();
  tiles([
    ["Generated, tok/s", last === null ? "–" : short(last.generated_per_s)],
    ["Prefilled, tok/s", last === null ? "–" : short(last.prefilled_per_s)],
    [`Running, of ${whole(state.max_running_requests)}`, whole(state.num_running_reqs)], ["Waiting", whole(state.num_waiting_reqs)],
    ["KV tokens in use", percent(state.num_used_tokens / state.max_total_num_tokens)],
    ["Weight version", state.weight_version], ["Weight epoch", whole(state.weight_epoch)], ["Up", upTime(now - server.started_at)],
  ]);
}

// [class, words] of the gate that matters most.
export function gate(data) {
  const phase = data?.server.phase;
  if (trouble.failures) return ["bad", "no answer"];
  if (phase === "failed") return ["bad", "failed"];
  if (engineNotice(data) !== null) return ["bad", "engine does not answer"];
  return gateOf(phase, data?.state ?? null);
}

// The same of a server whose engine answers.
export function gateOf(phase, state) {
  if (phase === "starting") return ["warn", "starting"];
  if (state !== null && state.poisoned !== null) return ["bad", "weights poisoned"];
  if (phase === "stopping") return ["warn", "draining"];
  if (state === null) return ["warn", "no state yet"];
  if (state.withheld !== null) return ["warn", Object.values(state.memory).includes("released") ? "memory released" : "withheld"];
  if (state.paused) return ["warn", "paused"];
  if (state.weight_update.steps_held) return ["warn", "steps held by an update"];
  return ["good", "serving"];
}

const STALE_S = 5;

// Of a server that answers: is the engine behind it alive?
export function engineNotice(data) {
  if (data === null) return null;
  const { phase, failure } = data.server, silent = data.answered_at === null ? null : data.now - data.answered_at;
  if (phase === "failed") return "The engine has failed" + (failure ? ": " + failure : ".");
  if (phase === "starting") return null;
  if (data.unanswered !== null || silent > STALE_S) {
    const since = silent === null ? "" : `Shown is the state of ${seconds(silent)} ago. `;
    return `${since}The engine does not answer${data.unanswered === null ? "." : ": " + data.unanswered}`;
  }
  return null;
}

export function drawGates() {
  const { state, server } = store.data, update = state.weight_update;
  const left = update.pause_left_s === null || update.pause_left_s === undefined ? "" : `; ends by itself in ${seconds(Math.max(0, update.pause_left_s))}`;
  const isReleased = Object.values(state.memory).includes("released");
  const rows = [
    ["Requests", server.phase === "serving" ? "admitted" : server.phase === "stopping" ? "refused: the server drains" : server.phase, server.phase === "serving" ? "good" : "warn"],
    ["Generation", state.paused ? "paused" + left : "goes on", state.paused ? "warn" : "good"],
    ["Steps", update.steps_held ? "held: an update writes into the model" : "run", update.steps_held ? "warn" : "good"],
    ["Weights", state.poisoned !== null ? "poisoned: " + state.poisoned : "one whole version", state.poisoned !== null ? "bad" : "good"],
    ["Serving", state.withheld !== null ? "withheld: " + state.withheld : "not withheld", state.withheld !== null ? "warn" : "good"],
    ...Object.entries(state.memory).filter(([tag]) => tag !== "cuda_graph" || state.device.startsWith("cuda")).map(([tag, value]) =>
      [`Memory, ${tag.replaceAll("_", " ")}`, value.replaceAll("_", " "), value === "in_use" ? "good" : "warn"]),
  ];
  put("gates", rows, () => list(rows));
  put("actions", [state.paused, isReleased, server.can_release_memory], () => h("div", { class: "buttons" },
    state.paused ? button("Continue generation", () => post("continue_generation", {})) : button("Pause generation", () => post("pause_generation", { mode: "in_place" })),
    button("Abort all requests", () => post("abort_request", { abort_all: true }), "End every request now?"),
    !server.can_release_memory ? null : isReleased ? button("Take memory again", () => post("resume_memory_occupation", {}))
      : button("Release KV memory", () => post("release_memory_occupation", { tags: ["kv_cache"] }), "Stop serving, release KV memory?")));
  const facts = [
    ["Model", `${bytes(state.model_bytes)} of weights, ${state.dtype}, on ${state.device}`],
    ["KV", `${bytes(state.kv_bytes)}; ${whole(state.num_cached_tokens)} tokens in the prefix cache`],
  ];
  put("memory-facts", facts, () => list(facts));
}

export function followSessions() {
  if (!$("sessions").clientWidth || performance.now() - askedAt < SESSIONS_MS) return;
  askedAt = performance.now();
  get("dashboard/sessions").then((answer) => {
    sessions = answer;
    if (store.data !== null) drawSessions();
  }, () => {});
}

export function drawSessions() {
  text("sessions-note", sessions === null || !sessions.num_sessions ? "" : `${whole(sessions.num_sessions)} known, ${whole(sessions.num_pinned_tokens)} tokens pinned.`);
  const rows = sessions?.sessions ?? [];
  put("sessions", rows.map((one) => [one.session_id, one.num_running, one.num_finished, one.kv_tokens]), () => !rows.length ? empty("No request has named a session.") : table([
    ["Session", (one) => one.session_id, "name"], ["Running", (one) => whole(one.num_running), "number"],
    ["Ended", (one) => whole(one.num_finished), "number"], ["Generated", (one) => whole(one.completion_tokens), "number"],
    ["From the cache", (one) => one.prompt_tokens ? percent(one.cached_tokens / one.prompt_tokens, 0) : "–", "number"],
    ["KV tokens", (one) => whole(one.kv_tokens), "number"],
  ], rows));
}

export function drawErrors() {
  const rows = [...store.data.refusals].reverse();
  put("errors", rows, () => !rows.length ? empty("No request was refused.") : table([
    ["Last", (one) => clock(one.at)], ["Times", (one) => whole(one.times), "number"],
    ["Status", (one) => h("span", { class: one.status >= 500 ? "bad" : "warn" }, one.status), "number"],
    ["Request", (one) => `${one.method} ${one.path}`, "name"], ["Reason", (one) => one.reason, "text"],
  ], rows));
}
