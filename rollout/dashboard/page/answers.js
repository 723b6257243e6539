// Lengths and finish reasons of the last samples, and the samples themselves, with their tokens coloured by version.

import { $, button, clip, empty, h, put, s } from "./dom.js";
import { clock, percent, precise, seconds, whole } from "./numbers.js";
import { get } from "./connection.js";
import { store } from "./store.js";

const TINTS = 5;
let samples = null, isAsking = false;

export function forgetSamples() { samples = null; }

export function drawAnswers() {
  const { answers } = store.data, width = $("chart-lengths").clientWidth;
  if (width) put("chart-lengths", [answers.length_counts, answers.length_edges, width], () => answers.num_samples ? bars(answers, width) : empty("No sample has ended yet."));
  const reasons = Object.entries(answers.reasons).sort((a, b) => b[1] - a[1]);
  put("reasons", reasons, () => h("div", {}, ...reasons.map(([name, count]) => {
    const share = count / answers.num_samples, bar = h("i", { class: name === "abort" ? "low" : null });
    bar.style.width = `${100 * share}%`;
    return h("div", { class: "share" }, h("span", {}, name), h("div", { class: "meter" }, bar), h("b", {}, `${whole(count)} (${percent(share, 0)})`));
  })));
  drawSamples(answers);
}

function bars({ length_counts: counts, length_edges: edges, num_samples: total }, width) {
  const left = 48, bottom = 104, top = 6, room = (Math.max(220, width) - left - 10) / counts.length, most = Math.max(...counts);
  const svg = s("svg", { width: Math.max(220, width), height: 126, role: "img", "aria-label": `Lengths of the last ${total} samples` });
  svg.append(s("line", { class: "axis", x1: left, x2: width - 10, y1: bottom, y2: bottom }),
    s("text", { x: left - 6, y: top + 8, "text-anchor": "end" }, whole(most)), s("text", { x: left - 6, y: bottom + 2, "text-anchor": "end" }, 0));
  const every = Math.ceil(50 / room);
  counts.forEach((count, index) => {
    const high = (bottom - top) * count / most, x = left + room * index;
    const bar = s("rect", { class: "f-one", x: x + 1, width: Math.max(1, room - 2), y: bottom - high, height: high, rx: 1 });
    bar.append(s("title", {}, `${whole(count)} samples of ${whole(edges[index])} to ${whole(edges[index + 1] - 1)} tokens`));
    svg.append(bar);
    if (index % every === 0) svg.append(s("text", { x, y: bottom + 15, "text-anchor": "middle" }, whole(edges[index])));
  });
  return svg;
}

async function load() {
  if (isAsking) return;
  isAsking = true;
  try {
    samples = (await get("dashboard/samples")).samples;
  } catch {
    // The next poll shows why.
  } finally {
    isAsking = false;
  }
  if (store.data !== null) drawAnswers();
}

// Read once when they are first looked at, and then on demand: what is read should not move away.
function drawSamples(answers) {
  if (!$("samples").clientWidth) return;
  if (samples === null && answers.keeps_samples && answers.last_sample) load();
  const fresh = answers.last_sample - (samples?.[0]?.number ?? 0);
  put("samples-bar", [answers.keeps_samples, samples === null, fresh], () => {
    if (!answers.keeps_samples) return empty("Tokens are kept only on a server that has a key or listens on this machine alone.");
    if (samples === null) return empty(answers.last_sample ? "Loading." : "No sample has ended yet.");
    return fresh > 0 ? h("div", { class: "buttons" }, button(`Show ${whole(Math.min(fresh, 24))} newer`, load)) : h("span");
  });
  put("samples", samples?.map((one) => one.number), ...(samples ?? []).map((one, index) => () => sampleView(one, index < 2)));
}

function sampleView(one, isOpen) {
  const oldest = one.spans.length ? one.weight_epoch - Math.min(...one.spans.map((span) => span[3])) : 0;
  const facts = [`${whole(one.num_prompt_tokens)} + ${whole(one.num_output_tokens)} tokens`, one.reason, seconds(one.seconds),
    one.num_cached_tokens ? `${whole(one.num_cached_tokens)} cached` : null,
    oldest ? `${whole(oldest)} version${oldest > 1 ? "s" : ""} old` : null, one.session_id === null ? null : `session ${one.session_id}`];
  const chips = one.spans.slice(0, 12).map((span) => h("span", { class: `version v${span[3] % TINTS}` }, `${clip(span[0], 24)}: ${span[1]}–${span[2] - 1}`));
  const view = h("details", { class: "sample" },
    h("summary", {}, h("b", {}, clock(one.at)), " ", h("code", {}, clip(one.rid, 20)), " ", h("span", { class: "quiet" }, facts.filter(Boolean).join(" · "))),
    h("div", { class: "versions" }, ...chips), tokens(one));
  view.open = isOpen;
  return view;
}

function tokens(one) {
  const words = (texts, ids, index) => texts === null ? `${ids[index]} ` : texts[index];
  const more = one.num_output_tokens - one.output_ids.length;
  return h("p", { class: "tokens" },
    one.num_prompt_tokens > one.prompt_ids.length ? h("span", { class: "quiet" }, "… ") : null,
    h("span", { class: "quiet" }, one.prompt_ids.map((_, index) => words(one.prompt, one.prompt_ids, index)).join("")),
    ...one.output_ids.map((id, index) => {
      const span = one.spans.find((found) => found[1] <= index && index < found[2]);
      const logprob = (one.logprobs[index] ?? null) === null ? "" : `, log-probability ${precise(one.logprobs[index])}`;
      return h("span", { class: span === undefined ? null : `v${span[3] % TINTS}`, title: `token ${index}: id ${id}${logprob}, ${span?.[0] ?? "version not known"}` },
        words(one.output, one.output_ids, index));
    }),
    more > 0 ? h("span", { class: "quiet" }, ` … ${whole(more)} more`) : null);
}
