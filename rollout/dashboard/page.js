"use strict";
// Everything that the server sends is put into the document as text or as a number, never as markup.
(() => {
  const POLL_MS = 1000, ANSWER_MS = 5000, SLOWEST_MS = 8000, STALE_S = 5, GAP_S = 4;
  const KEPT = { samples: 600, updates: 200, rebalances: 400, flips: 200 };
  const SPANS = [[60, "1 min"], [180, "3 min"], [600, "10 min"]];
  const LEAST_SPAN_S = 60, NARROW = 760, NEAR_PX = 9;
  const SVG = "http://www.w3.org/2000/svg";
  const $ = (id) => document.getElementById(id);

  let key = null, timer = 0, polling = false, failures = 0;
  let span = 600, hoverAt = null, received = 0;
  let data = null, history = empty();
  const drawn = new Map();

  function empty() { return { count: 0, samples: [], updates: [], rebalances: [], flips: [] }; }

  // --- elements ----------------------------------------------------------------------------------------------------

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined).map(
      (child) => child instanceof Node ? child : document.createTextNode(String(child))));
    return element;
  }
  const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  // Drawn anew only where it has changed, so that text can be selected and lists keep their place.
  function put(id, facts, ...children) {
    const mark = JSON.stringify(facts);
    if (drawn.get(id) === mark) return;
    drawn.set(id, mark);
    $(id).replaceChildren(...children.map((make) => make()));
  }
  function text(id, value) { if ($(id).textContent !== value) $(id).textContent = value; }

  // --- numbers -----------------------------------------------------------------------------------------------------

  function short(value) {
    for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (Math.abs(value) >= size) {
        const scaled = value / (unit === "k" ? 1e3 : size);
        return scaled.toFixed(scaled < 100 && scaled % 1 ? 1 : 0) + unit;
      }
    }
    return value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 10 ? 1 : 0 });
  }
  const whole = (value) => Math.round(value).toLocaleString("en");
  const percent = (share, digits = 1) => (100 * share).toFixed(digits) + " %";
  const clock = (at) => new Date(at * 1000).toLocaleTimeString("en", { hour12: false });
  function seconds(value) {
    if (value >= 90) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
    if (value >= 10) return value.toFixed(0) + " s";
    return value >= 1 ? value.toFixed(1) + " s" : (1000 * value).toFixed(value < 0.01 ? 1 : 0) + " ms";
  }
  function upTime(value) {
    for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
      if (value >= 2 * size) return `${Math.floor(value / size)} ${unit}`;
    }
    return `${Math.floor(value)} s`;
  }
  function bytes(value) {
    for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
      if (value >= size) return (value / size).toFixed(1) + " " + unit;
    }
    return value + " B";
  }
  function clip(label, chars) {
    const found = Array.from(label);
    return found.length <= chars ? label : found.slice(0, Math.max(1, chars - 1)).join("") + "…";
  }

  // --- charts over time --------------------------------------------------------------------------------------------

  const LEFT = 46, RIGHT = 10, TOP = 8, BOTTOM = 20;

  function frame(host, height, bottom = BOTTOM) {
    const width = Math.max(220, $(host).clientWidth);
    const start = Math.max(data.now - span, data.server.started_at), end = Math.max(data.now, start + LEAST_SPAN_S);
    return {
      width, height, start, end, bottom: height - bottom,
      x: (at) => LEFT + (width - LEFT - RIGHT) * (at - start) / (end - start),
      at: (x) => start + (end - start) * (x - LEFT) / (width - LEFT - RIGHT),
    };
  }

  function timeAxis(box) {
    const most = Math.max(1, Math.floor((box.width - LEFT - RIGHT) / 84)), found = [];
    const step = [5, 10, 15, 30, 60, 120, 180, 300].find((one) => (box.end - box.start) / one <= most) ?? 600;
    for (let at = Math.ceil(box.start / step) * step; at <= box.end; at += step) {
      const x = box.x(at);
      found.push(s("line", { class: "axis", x1: x, x2: x, y1: box.bottom, y2: box.bottom + 4 }));
      if (x > LEFT + 4 && x < box.width - 28) {
        found.push(s("text", { x, y: box.bottom + 15, "text-anchor": "middle" }, clock(at)));
      }
    }
    return found;
  }

  function ticks(top) {
    if (!(top > 0)) return [0, 1];
    const rough = top / 3, size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((n) => n * size).find((n) => n >= rough);
    const found = [];
    for (let value = 0; value < top + step; value += step) found.push(value);
    return found;
  }

  function shownSamples(box) {
    const first = history.samples.findIndex((one) => one.at >= box.start);
    return first < 0 ? [] : history.samples.slice(Math.max(0, first - 1));
  }

  // Spans of time in which generation was paused.
  function pauses(box, samples) {
    const found = [];
    let since = null, last = null;
    for (const one of [...samples, null]) {
      if (since !== null && (one === null || !one.paused)) {
        const x = Math.max(LEFT, box.x(since)), end = box.x(one === null ? last.at : one.at);
        found.push(s("rect", { class: "f-shade", x, width: Math.max(1, end - x), y: TOP, height: box.bottom - TOP }));
        since = null;
      }
      if (one !== null && one.paused && since === null) since = one.at;
      last = one;
    }
    return found;
  }

  const moves = (one) => one.num_experts_moved + one.num_local_copies;

  // Events that are no more than some pixels apart are one: {first, last: seconds, events}.
  function clusters(box, events) {
    const found = [];
    for (const one of events) {
      if (one.ended_at < box.start) continue;
      const last = found[found.length - 1];
      if (last !== undefined && box.x(one.ended_at) - box.x(last.last) < NEAR_PX) {
        last.last = one.ended_at;
        last.events.push(one);
      } else {
        found.push({ first: one.ended_at, last: one.ended_at, events: [one] });
      }
    }
    return found;
  }
  const refreshes = (box) => clusters(box, history.updates.filter((one) => one.kind === "committed" && one.num_tensors));
  const rebalances = (box) => clusters(box, history.rebalances.filter((one) => moves(one) > 0));

  // A line for an event that stands alone, a strip at the top for many in a row.
  function marks(box, y1, y2) {
    const found = [];
    const add = (group, colour, top, title) => {
      const x1 = box.x(group.first), x2 = box.x(group.last);
      const mark = group.events.length === 1 ? s("line", { class: `mark ${colour}`, x1, x2: x1, y1, y2 })
        : s("rect", { class: `strip ${colour}`, x: x1 - 1, width: x2 - x1 + 2, y: top, height: 3, rx: 1 });
      const many = `${group.events.length} in a row, ${clock(group.first)} to ${clock(group.last)}: `;
      mark.append(s("title", {}, (group.events.length === 1 ? "" : many) + title));
      found.push(mark);
    };
    for (const group of refreshes(box)) add(group, "c-three", y1 - 4, `weights ${group.events.map((one) => one.weight_version).slice(-5).join(", ")}`);
    for (const group of rebalances(box)) {
      add(group, "c-two", y1, `${whole(group.events.reduce((sum, one) => sum + moves(one), 0))} experts moved`);
    }
    return found;
  }

  // Means of the last `width` seconds, by sample; not over a gap.
  function smoothed(samples, values, width) {
    let from = 0, sum = 0;
    return values.map((value, index) => {
      if (index && samples[index].at - samples[index - 1].at > GAP_S) [from, sum] = [index, 0];
      sum += value;
      while (samples[index].at - samples[from].at >= width) sum -= values[from++];
      return sum / (index - from + 1);
    });
  }

  function path(box, samples, values, y) {
    const parts = [], areas = [];
    let last = null, from = null;
    const close = () => { if (from !== null) areas.push(`V${box.bottom}H${from}Z`); };
    for (const [index, one] of samples.entries()) {
      const x = Math.max(LEFT, box.x(one.at)), step = `${x.toFixed(1)} ${y(values[index]).toFixed(1)}`;
      if (last === null || one.at - last.at > GAP_S) {
        close();
        areas.push(`M${x.toFixed(1)} ${box.bottom}L${step}`);
        parts.push("M" + step);
        from = x.toFixed(1);
      } else {
        parts.push("L" + step);
        areas.push("L" + step);
      }
      last = one;
    }
    close();
    return [parts.join(""), areas.join("")];
  }

  function cursor(box, svg, y1, y2) {
    svg.addEventListener("pointermove", (event) => {
      hoverAt = box.at(event.clientX - svg.getBoundingClientRect().left);
      drawCharts();
    });
    svg.addEventListener("pointerleave", () => { hoverAt = null; drawCharts(); });
    if (hoverAt !== null && hoverAt >= box.start && hoverAt <= box.end) {
      svg.append(s("line", { class: "cursor", x1: box.x(hoverAt), x2: box.x(hoverAt), y1, y2 }));
    }
    return svg;
  }

  function sampleAt(at) {
    let best = null;
    for (const one of history.samples) {
      if (at === null || best === null || Math.abs(one.at - at) < Math.abs(best.at - at)) best = one;
    }
    return best !== null && at !== null && Math.abs(best.at - at) > GAP_S ? null : best;
  }

  // `lines`: {name, colour, value, area, show}.  `most`: the top of the scale, at least.  `smooth`: lines are means of
  // some seconds, in front of the samples; none of a minute.
  function chart(name, title, lines, { most = 0, unit = short, smooth = false } = {}) {
    const box = frame(`chart-${name}`, window.innerWidth < NARROW ? 110 : 170), samples = shownSamples(box);
    const now = sampleAt(hoverAt), width = smooth ? Math.round((box.end - box.start) / 120) : 0;
    const raw = lines.map((line) => samples.map(line.value));
    const shown = width > 1 ? raw.map((values) => smoothed(samples, values, width)) : raw;
    const place = now === null ? -1 : samples.indexOf(now);
    $(`legend-${name}`).replaceChildren(
      ...lines.map((line, index) => h("span", {}, h("i", { class: `key ${line.colour}` }), line.name + " ",
        h("b", {}, now === null ? "–" : line.show(place < 0 ? line.value(now) : shown[index][place], now)))),
      hoverAt === null ? "" : h("span", {}, "at " + clock(hoverAt)),
      width > 1 ? h("span", {}, `mean of ${width} s`) : "");
    const peak = Math.max(0, ...raw.flat());
    const steps = ticks(Math.max(most, peak)), top = steps[steps.length - 1];
    const y = (value) => box.bottom - (box.bottom - TOP) * value / top;
    const svg = s("svg", { width: box.width, height: box.height, role: "img", "aria-label": title });
    for (const value of peak > 0 ? steps : [0]) {  // of nothing there is no scale
      svg.append(s("line", { class: "grid", x1: LEFT, x2: box.width - RIGHT, y1: y(value), y2: y(value) }),
        s("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, unit(value)));
    }
    svg.append(...pauses(box, samples), ...timeAxis(box));
    if (!(peak > 0)) svg.append(s("text", { x: (LEFT + box.width) / 2, y: (TOP + box.bottom) / 2, "text-anchor": "middle" }, "idle"));
    for (const [index, line] of lines.entries()) {
      const [stroke, area] = path(box, samples, shown[index], y);
      if (line.area) svg.append(s("path", { class: `area ${line.colour}`, d: area }));
      if (width > 1) svg.append(s("path", { class: `line raw ${line.colour}`, d: path(box, samples, raw[index], y)[0] }));
      svg.append(s("path", { class: `line ${line.colour}`, d: stroke }));
    }
    svg.append(...marks(box, TOP, box.bottom));
    $(`chart-${name}`).replaceChildren(cursor(box, svg, TOP, box.bottom));
  }

  function drawCharts() {
    const state = data.state, plain = (value) => whole(value), rate = (value) => short(value) + " tok/s";
    chart("throughput", "Tokens per second over time", [
      { name: "Generated", colour: "c-one", value: (one) => one.generated_per_s, area: true, show: rate },
      { name: "Prefilled", colour: "c-two", value: (one) => one.prefilled_per_s, show: rate },
    ], { most: 3, smooth: true });
    chart("requests", "Requests over time", [
      { name: "Running", colour: "c-one", value: (one) => one.running, area: true, show: plain },
      { name: "Waiting", colour: "c-two", value: (one) => one.waiting, show: plain },
    ], { most: 3, smooth: true });
    const pool = state.max_total_num_tokens, rows = state.num_state_rows;
    const memory = [{
      name: "Tokens", colour: "c-one", value: (one) => one.used_tokens / pool, area: true,
      show: (value, one) => `${whole(one.used_tokens)} of ${whole(pool)} (${percent(value)})`,
    }];
    if (rows) {
      memory.push({
        name: "State rows and window pages", colour: "c-two", value: (one) => one.used_state_rows / rows,
        show: (value, one) => `${whole(one.used_state_rows)} of ${whole(rows)}`,
      });
    }
    chart("kv", "Share of the KV pool in use over time", memory, { most: 0.03, smooth: true, unit: (value) => +(100 * value).toFixed(1) + " %" });
    drawVersions();
    drawBalance();
  }

  // --- versions ----------------------------------------------------------------------------------------------------

  function drawVersions() {
    const box = frame("chart-versions", 86), samples = shownSamples(box);
    const labels = new Map(data.state.versions);
    for (const one of history.updates) if (one.weight_epoch !== null && !labels.has(one.weight_epoch)) labels.set(one.weight_epoch, one.weight_version);
    const commits = new Map(history.updates.filter((one) => one.weight_epoch !== null && one.num_tensors).map((one) => [one.weight_epoch, one.ended_at]));
    const svg = s("svg", { width: box.width, height: box.height, role: "img", "aria-label": "Weight versions over time" });
    const left = Math.max(LEFT, samples.length ? box.x(samples[0].at) : LEFT);
    const epochs = [...new Set(samples.map((one) => one.weight_epoch))];
    epochs.forEach((epoch, index) => {
      const own = samples.filter((one) => one.weight_epoch === epoch);
      const begin = Math.max(left, box.x(index ? commits.get(epoch) ?? own[0].at : own[0].at));
      const next = epochs[index + 1];
      const end = next === undefined ? box.x(own[own.length - 1].at)
        : box.x(commits.get(next) ?? samples.find((one) => one.weight_epoch === next).at);
      const label = labels.get(epoch) ?? "?", width = Math.max(1.5, end - begin - 1);
      const bar = s("rect", { class: epoch % 2 ? "f-one" : "f-old", x: begin, width, y: TOP, height: 20, rx: 3 });
      bar.append(s("title", {}, `version ${label}, epoch ${epoch}`));
      svg.append(bar);
      if (width > 26) svg.append(s("text", { class: "on", x: begin + 6, y: TOP + 14 }, clip(label, Math.floor((width - 10) / 7))));
    });
    svg.append(s("text", { x: LEFT - 6, y: TOP + 14, "text-anchor": "end" }, "serves"),
      s("text", { x: LEFT - 6, y: TOP + 42, "text-anchor": "end" }, "update"));
    for (const one of history.updates) drawUpdate(svg, box, one);
    svg.append(...timeAxis(box));
    $("chart-versions").replaceChildren(cursor(box, svg, TOP, box.bottom));
    const keys = [
      ["box c-three", "staging, steps go on"], ["box c-two", "staging, steps held"], ["box c-bad", "stall of the commit, or dropped"],
      ["rule c-three", "in the charts: refresh"], ["rule c-two", "experts moved"], ["strip c-two", "many in a row"], ["box c-shade", "paused"],
    ];
    put("legend-versions", 0, ...keys.map(([look, name]) => () => h("span", {}, h("i", { class: `key ${look}` }), name)));
  }

  function drawUpdate(svg, box, one) {
    const stall = one.ended_at - one.stall_s, begin = stall - one.staging_s, y = TOP + 30;
    if (one.ended_at < box.start) return;
    const x = Math.max(LEFT, box.x(begin));
    const bar = s("rect", { class: one.steps_held ? "f-two" : "f-three", x, width: Math.max(1.5, box.x(stall) - x), y: y + 3, height: 10, rx: 2 });
    const end = s("rect", { class: "f-bad", x: box.x(stall), width: Math.max(2, box.x(one.ended_at) - box.x(stall)), y, height: 16 });
    const what = one.kind === "committed" ? `stall ${seconds(one.stall_s)}` : `${one.kind}: ${one.reason}`;
    const before = one.prepared_s === null ? "" : `${seconds(one.prepared_s)} before begin, `;
    const title = `${one.weight_version ?? "no label"}: ${before}staging ${seconds(one.staging_s)}, ${what}`;
    bar.append(s("title", {}, title));
    end.append(s("title", {}, title));
    svg.append(bar, end);
    if (one.kind !== "committed") {
      svg.append(s("text", { class: "strong", x: box.x(one.ended_at) + 4, y: y + 12 }, "✕"));
    }
  }

  // As its sender sees it, but for what is between two calls: its own work before begin, then staging and commit.
  const wholeTime = (one) => (one.prepared_s ?? 0) + one.staging_s + one.stall_s;

  const OUTCOMES = { committed: ["good", "committed"], aborted: ["bad", "aborted"], lost: ["bad", "lost"] };

  function drawUpdates() {
    const rows = [...history.updates].reverse();
    put("updates", rows, () => {
      if (!rows.length) return h("p", { class: "empty" }, "No refresh yet. The server started with the version it serves.");
      return table([
        ["Version", (one) => one.weight_version ?? "–", "name"], ["Ended", (one) => clock(one.ended_at)],
        ["Outcome", (one) => h("span", { class: OUTCOMES[one.kind][0] }, one.num_tensors || one.kind !== "committed" ? OUTCOMES[one.kind][1] : "renamed")],
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

  function table(columns, rows) {
    return h("table", {},
      h("thead", {}, h("tr", {}, ...columns.map(([name, , kind]) => h("th", { class: kind }, name)))),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...columns.map(([label, value, kind]) => {
        const shown = value(row);
        const cut = kind === "text" && typeof shown === "string" ? clip(shown, 260) : shown;
        const title = kind === "name" || kind === "brief" || cut !== shown ? shown : null;
        return h("td", { class: kind, title, "data-label": label }, cut);
      })))));
  }

  // --- experts -----------------------------------------------------------------------------------------------------

  function drawLoads() {
    const experts = data.state.experts, layers = data.server.moe_layer_ids;
    const why = !layers.length ? "This model has no experts."
      : experts === null ? "Expert loads are not recorded." : experts.num_passes ? "" : "No forward pass was recorded yet.";
    text("title-loads", why ? "" : `Load of each rank, last ${experts.num_passes} forward passes${experts.recording ? "" : " (recording has stopped)"}`);
    text("title-balance", why ? "" : `Balance over time, ${isAlone() ? "of expert slots (one rank)" : "of ranks"}`);
    const width = $("chart-loads").clientWidth;
    if (why) {
      put("chart-loads", why, () => h("p", { class: "empty" }, why + " ", layers.length && experts === null
        ? button("Record them", () => post("start_expert_distribution_record", {})) : null));
      put("legend-loads", why);
      return;
    }
    put("chart-loads", [experts.rank_loads, width, layers], () => loads(experts.rank_loads, layers, width));
    put("legend-loads", [layers.length], () => h("span", {}, "below even", h("i", { class: "ramp two-sided" }), "above even (twice the mean or more)"));
  }

  function isAlone() { return data.state.experts.rank_loads.every((ranks) => ranks.length === 1); }

  // Loads [L][G] over their layer's mean: 1 is even.
  function loads(rankLoads, layers, width) {
    const left = 62, top = 16, ranks = rankLoads[0].length;
    const cell = Math.min(110, (Math.max(220, width) - left - 4) / ranks), high = rankLoads.length > 24 ? 9 : 19;
    const svg = s("svg", { width: left + cell * ranks + 4, height: top + high * rankLoads.length + 4, role: "img", "aria-label": "Load by layer and rank" });
    for (let rank = 0; rank < ranks; rank++) {
      svg.append(s("text", { x: left + cell * (rank + 0.5), y: 11, "text-anchor": "middle" }, cell > 44 ? `rank ${rank}` : rank));
    }
    rankLoads.forEach((tokens, index) => {
      const mean = tokens.reduce((sum, value) => sum + value, 0) / ranks, y = top + high * index;
      if (high > 10 || index % 4 === 0) {
        svg.append(s("text", { x: left - 6, y: y + high / 2 + 4, "text-anchor": "end" }, `layer ${layers[index]}`));
      }
      tokens.forEach((value, rank) => {
        const ratio = mean ? value / mean : 1, x = left + cell * rank;
        const tint = s("rect", { class: ratio >= 1 ? "f-hot" : "f-cold", x, y, width: cell - 1, height: high - 1, opacity: Math.min(1, Math.abs(ratio - 1)).toFixed(3) });
        tint.append(s("title", {}, `layer ${layers[index]}, rank ${rank}: ${whole(value)} tokens, ${ratio.toFixed(2)} times the mean`));
        svg.append(s("rect", { class: "f-even", x, y, width: cell - 1, height: high - 1 }), tint);
        if (cell > 34 && high > 10) {
          svg.append(s("text", { class: "strong", x: x + cell / 2, y: y + 13, "text-anchor": "middle", "pointer-events": "none" }, ratio.toFixed(2)));
        }
      });
    });
    return svg;
  }

  // A column a sample, a row a layer: how far the busiest is above the mean.
  function drawBalance() {
    const host = $("chart-balance"), box = frame("chart-balance", 0);
    const samples = shownSamples(box).filter((one) => one.balance !== null);
    const layers = data.server.moe_layer_ids, state = data.state;
    if (!layers.length || state.experts === null || !samples.length) {
      host.replaceChildren();
      put("legend-balance", 0);
      return;
    }
    const high = layers.length > 24 ? 9 : 19, top = 16, bottom = top + high * layers.length;
    box.bottom = bottom;
    const known = samples.flatMap((one) => one.balance).filter((value) => value !== null);
    const least = Math.min(0.9, ...known);
    const svg = s("svg", { width: box.width, height: bottom + BOTTOM, role: "img", "aria-label": "Balance by layer over time" });
    layers.forEach((layer, index) => {
      const y = top + high * index;
      svg.append(s("rect", { class: "f-even", x: LEFT, width: box.width - LEFT - RIGHT, y, height: high - 1, opacity: 0.45 }));
      if (high > 10 || index % 4 === 0) svg.append(s("text", { x: LEFT - 6, y: y + high / 2 + 4, "text-anchor": "end" }, layer));
      // Neighbours of one shade are one rectangle.
      let from = null, shade = null, until = null;
      const flush = () => {
        if (from !== null && shade > 0) {
          svg.append(s("rect", { class: "f-hot", x: from, width: Math.max(0.5, until - from), y, height: high - 1, opacity: shade }));
        }
        from = null;
      };
      samples.forEach((one, place) => {
        const value = one.balance[index], next = samples[place + 1];
        const now = value === null ? null : Math.round(20 * (1 - value) / (1 - least)) / 20;
        const x = Math.max(LEFT, box.x(one.at - POLL_MS / 1000)), end = box.x(one.at);
        if (from === null || now !== shade || x - until > 6) {
          flush();
          [from, shade] = [x, now];
        }
        until = end;
        if (next === undefined) flush();
      });
    });
    svg.append(...marks(box, 2, bottom), ...timeAxis(box));
    for (const group of rebalances(box)) {
      const x = (box.x(group.first) + box.x(group.last)) / 2, count = group.events.length;
      svg.append(s("text", { class: "strong", x, y: 11, "text-anchor": "middle" }, count === 1 ? "⇄" : `⇄ ${count}`));
    }
    host.replaceChildren(cursor(box, svg, top, bottom));
    const now = sampleAt(hoverAt), values = (now?.balance ?? []).filter((value) => value !== null);
    $("legend-balance").replaceChildren(
      h("span", {}, "even (1.00)", h("i", { class: "ramp one-sided" }), `mean over busiest ${least.toFixed(2)}`),
      h("span", {}, h("i", { class: "key rule c-three" }), "refresh"), h("span", {}, h("i", { class: "key rule c-two" }), "⇄ experts moved"),
      values.length ? h("span", {}, hoverAt === null ? "now " : "there ", h("b", {}, (values.reduce((sum, value) => sum + value, 0) / values.length).toFixed(3)), ", least ", h("b", {}, Math.min(...values).toFixed(3))) : "");
  }

  function drawRebalances() {
    const eplb = data.state.eplb, rows = [...history.rebalances].reverse();
    const line = eplb === null ? (data.server.moe_layer_ids.length ? "Experts are not spread over ranks: nothing to rebalance." : "")
      : `Balancer: ${eplb.stuck ?? eplb.stage}, ${whole(eplb.num_evaluations)} evaluations.${eplb.reason ? " The last: " + clip(eplb.reason, window.innerWidth < NARROW ? 90 : 400) : ""}`;
    text("eplb", line);
    put("rebalances", [rows, eplb === null], () => {
      if (eplb === null) return h("span");
      if (!rows.length) return h("p", { class: "empty" }, "No rebalance yet.");
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
      const last = found[found.length - 1];
      if (last !== undefined && !moves(last) && !moves(one) && last.dropped === null && one.dropped === null) {
        [last.repeats, last.since] = [last.repeats + 1, one.ended_at];
      } else {
        found.push({ ...one, repeats: 1, since: one.ended_at });
      }
    }
    return found;
  }

  // --- flips -------------------------------------------------------------------------------------------------------

  function drawFlips() {
    const layers = data.server.moe_layer_ids, rows = [...history.flips].reverse(), tokens = data.probe_tokens;
    text("flips-note", !layers.length ? "This model has no experts." : tokens === null && !rows.length ? ""
      : "Share of (token, layer) pairs of one text whose set of experts changed from one version to the next, the text scored again under each."
        + (tokens === null ? " The text was taken away." : ` The text has ${whole(tokens)} tokens.`));
    put("flips", [rows, tokens, layers], () => {
      if (!layers.length) return h("span");
      if (!rows.length) {
        return h("div", { class: "empty" }, tokens === null ? "No text is set to measure with. It is scored after each refresh."
          : "No refresh yet since the text was set.", tokens === null ? probeForm() : null);
      }
      const most = Math.max(0.02, ...rows.flatMap((one) => one.by_layer));
      return h("div", {}, table([
        ["Flipped", (one) => percent(one.share, 2), "number"], ["By layer", (one) => strip(one.by_layer, layers, most)],
        ["From", (one) => one.from_version, "brief"], ["To", (one) => one.to_version, "brief"],
      ], rows), h("p", { class: "quiet" }, "0", h("i", { class: "ramp flips" }), percent(most)));
    });
    const drift = data.state.experts?.drift ?? null;
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

  function driftText(drift) {
    const mean = (values) => { const known = values.filter((value) => value !== null); return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null; };
    const measured = mean(drift.total_variation), chance = mean(drift.expected_by_chance);
    if (measured === null || chance === null) return "";
    return `Load drift of the traffic from ${drift.from_weight_version} to ${drift.to_weight_version}: experts' shares differ by ${percent(measured)} `
      + `(total variation, mean over layers); ${percent(chance)} would be chance alone.`;
  }

  // --- state -------------------------------------------------------------------------------------------------------

  function drawTiles() {
    const state = data.state, last = sampleAt(null);
    const tiles = [
      ["Generated, tok/s", last === null ? "–" : short(last.generated_per_s)],
      ["Prefilled, tok/s", last === null ? "–" : short(last.prefilled_per_s)],
      [`Running, of ${whole(state.max_running_requests)}`, whole(state.num_running_reqs)], ["Waiting", whole(state.num_waiting_reqs)],
      ["KV tokens in use", percent(state.num_used_tokens / state.max_total_num_tokens)],
      ["Weight version", state.weight_version], ["Weight epoch", whole(state.weight_epoch)], ["Up", upTime(data.now - data.server.started_at)],
    ];
    put("tiles", tiles, ...tiles.map(([name, value]) => () => h("div", { class: "tile" }, h("span", {}, name), h("b", { title: value }, value))));
  }

  // [class, words] of the gate that matters most.
  function gate() {
    const state = data?.state ?? null, phase = data?.server.phase;
    if (failures) return ["bad", "no answer"];
    if (phase === "failed") return ["bad", "failed"];
    if (engineNotice() !== null) return ["bad", "engine does not answer"];
    if (phase === "starting") return ["warn", "starting"];
    if (state !== null && state.poisoned !== null) return ["bad", "weights poisoned"];
    if (phase === "stopping") return ["warn", "draining"];
    if (state === null) return ["warn", "no state yet"];
    if (state.withheld !== null) return ["warn", Object.values(state.memory).includes("released") ? "memory released" : "withheld"];
    if (state.paused) return ["warn", "paused"];
    if (state.weight_update.steps_held) return ["warn", "steps held by an update"];
    return ["good", "serving"];
  }

  function drawGates() {
    const state = data.state, update = state.weight_update;
    const left = update.pause_left_s === null || update.pause_left_s === undefined ? "" : `; ends by itself in ${seconds(Math.max(0, update.pause_left_s))}`;
    const rows = [
      ["Requests", data.server.phase === "serving" ? ["good", "admitted"] : ["warn", data.server.phase === "stopping" ? "refused: the server drains" : data.server.phase]],
      ["Generation", state.paused ? ["warn", "paused" + left] : ["good", "goes on"]],
      ["Steps", update.steps_held ? ["warn", "held: an update writes into the model"] : ["good", "run"]],
      ["Weights", state.poisoned !== null ? ["bad", "poisoned: " + state.poisoned] : ["good", "one whole version"]],
      ["Serving", state.withheld !== null ? ["warn", "withheld: " + state.withheld] : ["good", "not withheld"]],
      ...Object.entries(state.memory).filter(([tag]) => tag !== "cuda_graph" || state.device.startsWith("cuda")).map(([tag, value]) => [`Memory, ${tag.replaceAll("_", " ")}`, [value === "in_use" ? "good" : "warn", value.replaceAll("_", " ")]]),
    ];
    put("gates", rows, () => h("dl", {}, ...rows.flatMap(([name, [colour, words]]) => [h("dt", {}, name), h("dd", { class: colour }, words)])));
  }

  function drawUpdateUnderWay() {
    const update = data.state.weight_update, isIdle = !update.open && !update.last_failure;
    $("card-update").hidden = isIdle;
    for (const id of ["card-flips", "card-gates"]) $(id).classList.toggle("half", isIdle);
    put("update", [update, data.state.weight_epoch], () => {
      if (!update.open) {
        const last = update.last_failure;
        return h("div", {}, h("p", { class: "empty" }, "No weight update is open."),
          last ? h("p", {}, h("span", { class: "bad" }, "The last one failed"), ` at ${clock(last.time)}: ${last.reason}`) : null);
      }
      const all = update.received + update.missing, endless = update.lease_s === null || update.lease_left_s === null;
      const rows = [
        ["Version", update.weight_version ?? "not named yet"], ["Update", update.update_id ?? "–"],
        ["State", update.failed ? h("span", { class: "bad" }, "failed: " + update.failed) : update.state + (update.implicit ? ", without begin and end" : "")],
        ["Coverage", `${update.coverage}, staged ${update.staging}`],
        ["Tensors", h("div", {}, `${whole(update.received)} of ${whole(all)}, ${bytes(update.num_bytes)}`, meter(all ? update.received / all : 0))],
        ["Lease", endless ? "never ends" : h("div", {}, `${seconds(Math.max(0, update.lease_left_s))} left of ${seconds(update.lease_s)}`,
          meter(update.lease_left_s / update.lease_s, 0.2))],
      ];
      return h("dl", {}, ...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
    });
  }

  function meter(share, low = 0) {
    const bar = h("i", { class: share < low ? "low" : null });
    bar.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
    return h("div", { class: "meter" }, bar);
  }

  function drawErrors() {
    const rows = [...data.refusals].reverse();
    put("errors", rows, () => !rows.length ? h("p", { class: "empty" }, "No request was refused.") : table([
      ["Last", (one) => clock(one.at)], ["Times", (one) => whole(one.times), "number"],
      ["Status", (one) => h("span", { class: one.status >= 500 ? "bad" : "warn" }, one.status), "number"],
      ["Request", (one) => `${one.method} ${one.path}`, "name"], ["Reason", (one) => one.reason, "text"],
    ], rows));
  }

  function draw() {
    const [colour, words] = gate();
    $("gate").className = `chip ${colour}`;
    text("gate", words);
    document.title = `Lockstep · ${words}`;
    if (data === null) return;
    text("model", `${data.server.model} · ${data.server.version}`);
    $("main").hidden = data.state === null;
    if (data.state === null) return;
    drawTiles();
    drawCharts();
    drawUpdates();
    drawLoads();
    drawRebalances();
    drawFlips();
    drawUpdateUnderWay();
    drawGates();
    drawErrors();
  }

  // --- polling -----------------------------------------------------------------------------------------------------

  function take(fresh) {
    if (data !== null && data.server.started_at !== fresh.server.started_at || fresh.count < history.count) {
      history = empty();  // another server answers now: all of its history is asked for next
      drawn.clear();
      data = fresh;
      return false;
    }
    const again = new Set(fresh.rebalances.map((one) => one.number));  // told again once their effect was measured
    history.rebalances = history.rebalances.filter((one) => !again.has(one.number));
    for (const [name, most] of Object.entries(KEPT)) {
      history[name] = [...history[name], ...fresh[name]].slice(-most);
    }
    history.count = fresh.count;
    data = fresh;
    return true;
  }

  function notice(words) {
    $("notice").hidden = words === null;
    text("notice", words ?? "");
    document.body.classList.toggle("stale", words !== null);
  }

  // Of a server that answers: is the engine behind it alive?
  function engineNotice() {
    const { phase, failure } = data.server, silent = data.answered_at === null ? null : data.now - data.answered_at;
    if (phase === "failed") return "The engine has failed" + (failure ? ": " + failure : ".");
    if (phase === "starting") return null;
    if (data.unanswered !== null || silent > STALE_S) {
      const since = silent === null ? "" : `Shown is the state of ${seconds(silent)} ago. `;
      return `${since}The engine does not answer${data.unanswered === null ? "." : ": " + data.unanswered}`;
    }
    return null;
  }

  function ask(message) {
    data = null;
    history = empty();
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

  const keyHeaders = () => key === null ? {} : { Authorization: `Bearer ${key}` };

  function button(name, act) {
    const made = h("button", { type: "button" }, name);
    made.addEventListener("click", act);
    return made;
  }

  // Ask the server for something; what it says against it is shown until the next poll.
  async function post(path, body) {
    try {
      const headers = { ...keyHeaders(), "Content-Type": "application/json" };
      const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), redirect: "error", signal: AbortSignal.timeout(ANSWER_MS) });
      if (!response.ok) throw new Error((await response.json())?.error?.message ?? `status ${response.status}`);
      poll();
    } catch (error) {
      notice(error.message);
    }
  }

  async function poll() {
    clearTimeout(timer);
    if (polling || document.hidden) return;
    polling = true;
    let wait = POLL_MS;
    try {
      const headers = keyHeaders();
      const response = await fetch(`dashboard/data?since=${history.count}`, { headers, cache: "no-store", redirect: "error", signal: AbortSignal.timeout(ANSWER_MS) });
      if (response.status === 401) {
        ask(key === null ? "" : "The server does not take this key.");
        key = null;
        return;
      }
      const body = await response.json();
      if (!response.ok) throw new Error(body?.error?.message ?? `status ${response.status}`);
      failures = 0;
      received = performance.now();
      if (!take(body)) wait = 0;
      notice(engineNotice());
      draw();
      text("live", `live · ${clock(data.now)}`);
    } catch (error) {
      failures += 1;
      wait = Math.min(SLOWEST_MS, POLL_MS * 2 ** Math.max(0, failures - 3));
      const ago = received ? ` Shown is what it said ${seconds((performance.now() - received) / 1000)} ago.` : "";
      const why = error.name === "TimeoutError" ? `it has not answered within ${ANSWER_MS / 1000} s`
        : error instanceof TypeError ? "it cannot be reached" : error.message;
      notice(`No answer from the server: ${why}.${ago} Trying again.`);
      text("live", "disconnected");
      draw();
    } finally {
      polling = false;
    }
    timer = setTimeout(poll, wait);
  }

  $("keys").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = $("key").value.trim();
    $("key").value = "";
    if (!/^[\x20-\x7e]+$/.test(given)) {
      text("key-message", "A browser can send keys of ASCII characters only.");
      return;
    }
    key = given;
    $("keys").hidden = true;
    poll();
  });
  for (const [size, name] of SPANS) {
    const button = h("button", { type: "button", "aria-pressed": String(size === span) }, name);
    button.addEventListener("click", () => {
      span = size;
      for (const other of $("spans").children) other.setAttribute("aria-pressed", String(other === button));
      if ($("keys").hidden) draw();
    });
    $("spans").append(button);
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden && $("keys").hidden) poll(); });
  window.addEventListener("resize", () => { if ($("keys").hidden) draw(); });
  poll();
})();
