// The dashboard of one server: polls it once a second, and draws.

import { drawAnswers, forgetSamples } from "./answers.js";
import { drawCharts } from "./charts.js";
import { ANSWER_MS, ask, hasKey, onAction, setKey, trouble } from "./connection.js";
import { $, forgetDrawn, text } from "./dom.js";
import { drawBalance, drawExperts, drawLoads, drawRebalances, followExperts, forgetExperts } from "./experts.js";
import { drawFlips } from "./flips.js";
import { clock, seconds } from "./numbers.js";
import { drawErrors, drawGates, drawSessions, drawTiles, engineNotice, followSessions, forgetSessions, gate } from "./state.js";
import { offerSpans } from "./spans.js";
import { NARROW, reset, store, take } from "./store.js";
import { charts } from "./time_chart.js";
import { drawUpdates, drawUpdateUnderWay, drawVersions } from "./versions.js";

const POLL_MS = 1000, SLOWEST_MS = 8000, OPEN_ON_A_PHONE = ["part-serving", "part-weights"];
let timer = 0, isPolling = false, received = 0, refusedUntil = 0;

function draw() {
  const [colour, words] = gate(store.data);
  $("gate").className = `chip ${colour}`;
  text("gate", words);
  document.title = `Lockstep · ${words}`;
  if (store.data === null) return;
  text("model", `${store.data.server.model} · ${store.data.server.version}`);
  $("main").hidden = store.data.state === null;
  if (store.data.state === null) return;
  for (const part of [drawTiles, drawCharts, drawVersions, drawUpdates, drawUpdateUnderWay, drawLoads, drawExperts, drawBalance,
    drawRebalances, drawFlips, drawAnswers, drawGates, drawSessions, drawErrors, followExperts, followSessions]) part();
}

function notice(words) {
  $("notice").hidden = words === null;
  text("notice", words ?? "");
}

function forget() {
  forgetDrawn();
  forgetSamples();
  forgetSessions();
  forgetExperts();
}

function askForKey(message) {
  reset();
  forget();
  $("gate").className = "chip";
  text("gate", "");
  text("model", "");
  $("keys").hidden = false;
  $("main").hidden = true;
  notice(null);
  text("key-message", message);
  text("live", "");
  $("key").focus();
}

async function poll() {
  clearTimeout(timer);
  if (isPolling || document.hidden) return;
  isPolling = true;
  let wait = POLL_MS;
  try {
    const response = await ask(`dashboard/data?since=${store.history.count}`);
    if (response.status === 401) {
      askForKey(hasKey() ? "The server does not take this key." : "");
      setKey(null);
      return;
    }
    const body = await response.json();
    if (!response.ok) throw new Error(body?.error?.message ?? `status ${response.status}`);
    trouble.failures = 0;
    received = performance.now();
    if (!take(body)) {
      forget();
      wait = 0;
    }
    const words = engineNotice(store.data);
    document.body.classList.toggle("stale", words !== null);
    if (words !== null || performance.now() > refusedUntil) notice(words);
    draw();
    text("live", `live · ${clock(store.data.now)}`);
  } catch (error) {
    trouble.failures += 1;
    wait = Math.min(SLOWEST_MS, POLL_MS * 2 ** Math.max(0, trouble.failures - 3));
    const ago = received ? ` Shown is its state of ${seconds((performance.now() - received) / 1000)} ago.` : "";
    const why = error.name === "TimeoutError" ? `it has not answered within ${ANSWER_MS / 1000} s`
      : error instanceof TypeError ? "it cannot be reached" : error.message;
    document.body.classList.add("stale");
    notice(`No answer from the server: ${why}.${ago} Trying again.`);
    text("live", "disconnected");
    draw();
  } finally {
    isPolling = false;
  }
  timer = setTimeout(poll, wait);
}

function drawAgain() {
  if ($("keys").hidden && store.data !== null) draw();
}

function start() {
  const isNarrow = window.innerWidth < NARROW;
  for (const part of document.querySelectorAll("details.part")) {
    part.open = !isNarrow || OPEN_ON_A_PHONE.includes(part.id);
    part.addEventListener("toggle", drawAgain);
  }
  $("keys").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = $("key").value.trim();
    $("key").value = "";
    if (!/^[\x20-\x7e]+$/.test(given)) {
      text("key-message", "A browser can send keys of ASCII characters only.");
      return;
    }
    setKey(given);
    $("keys").hidden = true;
    poll();
  });
  offerSpans(drawAgain);
  onAction(poll, (words) => {
    refusedUntil = performance.now() + 6000;
    notice(words);
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden && $("keys").hidden) poll(); });
  window.lockstep = { charts, store };  // for a look from the browser's console
  poll();
}

start();
