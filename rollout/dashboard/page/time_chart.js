// A chart over time, drawn by uPlot.  All charts share the time shown, the cursor and the zoom.

import { $, h } from "./dom.js";
import { clock, short, ticks } from "./numbers.js";
import { NARROW, clusters, isGap, isRefresh, moves, shownSamples, shownTime, smoothed, store } from "./store.js";

export const charts = new Map();  // by name: {plot, marks, ...}
const listeners = { zoom: () => {} };

export function onZoom(act) { listeners.zoom = act; }

export function zoomTo(range) {
  store.zoom = range;
  listeners.zoom();
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const height = () => window.innerWidth < NARROW ? 120 : 170;

function faded(name, share) {
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = colour(name);
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(probe.fillStyle.slice(at, at + 2), 16));
  return `rgba(${red}, ${green}, ${blue}, ${share})`;
}

// A line for an event that stands alone, a strip at the top for many in a row; shades for pauses.
function drawMarks(chart, plot) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio;
  ctx.save();
  for (const { groups, name } of chart.marks) {
    ctx.strokeStyle = ctx.fillStyle = colour(name);
    for (const group of groups) {
      const x1 = plot.valToPos(group.first, "x", true), x2 = plot.valToPos(group.last, "x", true);
      if (group.events.length > 1) {
        ctx.fillRect(x1 - ratio, bbox.top - (name === "three" ? 5 : 1) * ratio, x2 - x1 + 2 * ratio, 3 * ratio);
        continue;
      }
      ctx.setLineDash([3 * ratio, 3 * ratio]);
      ctx.lineWidth = ratio;
      ctx.globalAlpha = 0.75;
      ctx.beginPath();
      ctx.moveTo(x1, bbox.top);
      ctx.lineTo(x1, bbox.top + bbox.height);
      ctx.stroke();
      ctx.globalAlpha = 1;
    }
  }
  ctx.restore();
}

function drawPauses(chart, plot) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.fillStyle = colour("shade");
  for (const [from, to] of chart.pauses) {
    const x = Math.max(bbox.left, plot.valToPos(from, "x", true));
    ctx.fillRect(x, bbox.top, Math.max(1, plot.valToPos(to, "x", true) - x), bbox.height);
  }
  ctx.restore();
}

// Spans of time in which generation was paused.
function pauses(samples) {
  const found = [];
  let since = null, last = null;
  for (const one of [...samples, null]) {
    if (since !== null && (one === null || !one.paused)) {
      found.push([since, one === null ? last.at : one.at]);
      since = null;
    }
    if (one !== null && one.paused && since === null) since = one.at;
    last = one;
  }
  return found;
}

function build(chart) {
  const axis = { stroke: colour("quiet"), font: "11px system-ui, sans-serif", ticks: { show: false } };
  const grid = { stroke: colour("grid"), width: 1 };
  const lineOf = (line, isRaw) => ({
    scale: "y", points: { show: chart.dots && !isRaw, size: 5 }, spanGaps: false,
    stroke: isRaw ? faded(line.colour, 0.3) : colour(line.colour), width: isRaw ? 1 : 1.6,
    fill: line.area && !isRaw ? faded(line.colour, 0.12) : undefined,
  });
  chart.plot?.destroy();
  chart.plot = new uPlot({
    width: Math.max(220, chart.host.clientWidth), height: height(), padding: [8, 10, 0, 0],
    legend: { show: false },
    scales: { x: { time: true, range: () => shownTime() }, y: { range: () => [chart.steps[0], chart.steps.at(-1)] } },
    axes: [
      { ...axis, grid: { show: false }, size: 24, space: 84, values: (_, at) => at.map(clock) },
      { ...axis, grid, size: 52, gap: 4, splits: () => chart.isIdle ? [] : chart.steps, values: (_, found) => found.map(chart.unit) },
    ],
    series: [{}, ...chart.lines.flatMap((line) => [lineOf(line, true), lineOf(line, false)])],
    cursor: {
      drag: { x: true, y: false, setScale: false }, points: { show: false }, y: false,
      sync: { key: "time", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      bind: { dblclick: () => () => { zoomTo(null); return null; } },
    },
    hooks: {
      setSelect: [(plot) => {
        const { left, width } = plot.select;
        if (width < 6) return;
        const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
        plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        if (range[1] - range[0] >= 2) zoomTo(range);
      }],
      setCursor: [(plot) => {
        const { left } = plot.cursor;
        store.hoverAt = left === undefined || left === null || left < 0 ? null : plot.posToVal(left, "x");
        legend(chart);
      }],
      drawClear: [(plot) => drawPauses(chart, plot)],
      draw: [(plot) => drawMarks(chart, plot)],
    },
  }, chart.columns, chart.plotHost);
}

function indexAt(samples, at) {
  let best = -1;
  samples.forEach((one, index) => {
    if (one !== null && (best < 0 || Math.abs(one.at - at) < Math.abs(samples[best].at - at))) best = index;
  });
  return best >= 0 && Math.abs(samples[best].at - at) > 30 ? -1 : best;
}

function legend(chart) {
  const at = store.hoverAt, last = chart.places.length - 1;
  const index = at === null ? (store.zoom === null ? last : -1) : indexAt(chart.places, at);
  const values = chart.lines.map((line, place) => {
    const found = index < 0 ? null : chart.shown[place][index] ?? null;
    return h("span", {}, h("i", { class: `key c-${line.colour}` }), line.name + " ",
      h("b", {}, found === null ? "–" : (line.show ?? chart.show)(found, chart.places[index])));
  });
  const events = at === null ? [] : eventsNear(chart, at);
  $(`legend-${chart.name}`).replaceChildren(...values,
    ...at === null ? [] : [h("span", {}, "at " + clock(at))], ...events.map((words) => h("span", {}, words)),
    ...chart.smoothS > 1 && at === null ? [h("span", {}, `mean of ${chart.smoothS} s`)] : []);
}

// What the marks near the cursor stand for.
function eventsNear(chart, at) {
  const [start, end] = shownTime(), near = 6 * (end - start) / Math.max(1, chart.host.clientWidth);
  return chart.marks.flatMap(({ groups, title }) =>
    groups.filter((group) => at >= group.first - near && at <= group.last + near).map((group) => title(group.events)));
}

export function marksOf(range, width) {
  const { updates, rebalances } = store.history;
  return [
    { name: "three", groups: clusters(updates.filter(isRefresh), range, width),
      title: (events) => `refresh ${events.slice(-3).map((one) => one.weight_version).join(", ")}` },
    { name: "two", groups: clusters(rebalances.filter((one) => moves(one) > 0), range, width),
      title: (events) => `${events.length > 1 ? `${events.length} rebalances, ` : ""}${short(events.reduce((sum, one) => sum + moves(one), 0))} experts moved` },
  ];
}

// `lines`: {name, colour, value, area, show}; a value is a number or null.  `most`: the top of the scale, at least.
// `free`: the scale need not begin at 0.  `events`: draw marks and pauses.  `places`: other entries than the samples.
export function timeChart(name, lines, { most = 0, unit = short, show = short, smooth = true, free = false, isBinary = false, zeroIsIdle = true, events = true, places = null, dots = false, none = "idle" } = {}) {
  const host = $(`chart-${name}`);
  if (host === null || !host.clientWidth) return;  // in a closed section
  const range = shownTime(), entries = places ?? shownSamples(range);
  const smoothS = smooth ? Math.round((range[1] - range[0]) / 120) : 0;
  const raw = lines.map((line) => entries.map((one) => line.value(one) ?? null));
  const shown = smoothS > 1 ? raw.map((values) => smoothed(entries, values, smoothS)) : raw;
  const known = (smoothS > 1 ? [...raw, ...shown] : raw).flat().filter((value) => value !== null);
  const peak = known.reduce((best, value) => Math.max(best, value), free ? -Infinity : 0);
  const low = free ? known.reduce((best, value) => Math.min(best, value), Infinity) : 0;
  let chart = charts.get(name);
  if (chart === undefined) charts.set(name, chart = { name, host, plot: null });
  const isIdle = !known.length || zeroIsIdle && !free && !(peak > 0);
  Object.assign(chart, { host, lines, unit, show, shown, smoothS, isIdle, dots, places: entries });
  chart.steps = isIdle ? [0, 1] : ticks(Math.max(most, peak), free ? (low < peak ? low : low - Math.max(1e-6, Math.abs(low) / 10)) : 0, isBinary);
  chart.marks = events ? marksOf(range, host.clientWidth) : [];
  chart.pauses = events ? pauses(entries) : [];
  chart.columns = withGaps(entries, places === null, smoothS > 1 ? lines.flatMap((_, index) => [raw[index], shown[index]]) : raw.flatMap((values) => [values.map(() => null), values]));
  const theme = colour("one"), key = `${theme} ${lines.length} ${devicePixelRatio}`;
  if (chart.plot === null || chart.key !== key || !host.contains(chart.plot.root)) {
    chart.key = key;
    chart.plotHost = h("div", {});
    chart.words = h("p", { class: "idle" });
    host.replaceChildren(chart.plotHost, chart.words);
    build(chart);
  } else {
    const width = Math.max(220, host.clientWidth);
    if (chart.plot.width !== width || chart.plot.height !== height()) chart.plot.setSize({ width, height: height() });
    chart.plot.setData(chart.columns);
  }
  chart.words.hidden = !isIdle;
  chart.words.textContent = known.length ? "idle" : none;
  legend(chart);
}

// Columns for uPlot, with an empty place in each gap.
function withGaps(entries, breaks, rows) {
  const columns = [[], ...rows.map(() => [])];
  entries.forEach((one, index) => {
    if (breaks && index && isGap(entries[index - 1], one)) {
      columns[0].push((entries[index - 1].at + one.at) / 2);
      for (const column of columns.slice(1)) column.push(null);
    }
    columns[0].push(one.at);
    rows.forEach((values, place) => columns[place + 1].push(values[index]));
  });
  return columns;
}
