// What the server has sent, and which part of it is shown.

const KEPT = { updates: 200, rebalances: 400, flips: 200, trainer: 1000 };
const KEPT_S = 3600;
export const SPANS = [[180, "3 min"], [600, "10 min"], [3600, "1 hour"]];
export const NARROW = 760;
const LEAST_SPAN_S = 60, MERGED_GAP_S = 25, NEAR_PX = 9;

const empty = () => ({ count: 0, samples: [], updates: [], rebalances: [], flips: [], trainer: [] });

// `data`: the last answer; `zoom`: [from, to] in seconds since 1970, or null for the last `span` seconds.
// `gapS`: samples further apart than this are not joined by a line.
export const store = { data: null, history: empty(), span: 600, zoom: null, hoverAt: null, gapS: 4 };

export function reset() {
  store.data = null;
  store.history = empty();
  store.zoom = store.hoverAt = null;
}

// Take an answer.  False: another server answers now, so all of its history is to be asked for.
export function take(fresh) {
  const { data, history } = store;
  if (data !== null && data.server.started_at !== fresh.server.started_at || fresh.count < history.count) {
    reset();
    store.data = fresh;
    return false;
  }
  const again = new Set(fresh.rebalances.map((one) => one.number));  // sent again once their effect was measured
  history.rebalances = history.rebalances.filter((one) => !again.has(one.number));
  for (const [name, most] of Object.entries(KEPT)) history[name] = [...history[name], ...fresh[name]].slice(-most);
  const samples = [...history.samples, ...fresh.samples], from = samples.findIndex((one) => one.at >= fresh.now - KEPT_S);
  history.samples = from > 0 ? samples.slice(from) : samples;
  history.count = fresh.count;
  store.data = fresh;
  return true;
}

// The time that charts show: it begins with the server, and grows to the span.
export function shownTime() {
  if (store.zoom !== null) return store.zoom;
  const { data } = store, start = Math.max(data.now - store.span, data.server.started_at);
  return [start, Math.max(data.now, start + LEAST_SPAN_S)];
}

export function shownSamples([start, end]) {
  const { samples } = store.history, first = samples.findIndex((one) => one.at >= start);
  if (first < 0) return [];
  const last = samples.findLastIndex((one) => one.at <= end);
  return samples.slice(Math.max(0, first - 1), last + 2);
}

export const lastSample = () => store.history.samples.at(-1) ?? null;

// Whether nothing is known of the time between two samples.  Older ones are means of ten seconds.
export const isGap = (before, after) => after.at - before.at > (store.data.now - after.at > 560 ? MERGED_GAP_S : store.gapS);

export const moves = (one) => one.num_experts_moved + one.num_local_copies;
export const isRefresh = (one) => one.kind === "committed" && one.num_tensors > 0;

// Events that are no more than some pixels apart are one: {first, last: seconds, events}.
export function clusters(events, [start, end], width) {
  const found = [], near = NEAR_PX * (end - start) / Math.max(1, width);
  for (const one of events) {
    if (one.ended_at < start || one.ended_at > end) continue;
    const last = found.at(-1);
    if (last !== undefined && one.ended_at - last.last < near) {
      last.last = one.ended_at;
      last.events.push(one);
    } else {
      found.push({ first: one.ended_at, last: one.ended_at, events: [one] });
    }
  }
  return found;
}

// Means of the last `width` seconds, by sample; not over a gap, and without the values that are null.
export function smoothed(samples, values, width) {
  let from = 0, sum = 0, count = 0;
  return values.map((value, index) => {
    if (index && isGap(samples[index - 1], samples[index])) [from, sum, count] = [index, 0, 0];
    if (value !== null) [sum, count] = [sum + value, count + 1];
    while (from < index && samples[index].at - samples[from].at >= width) {
      if (values[from] !== null) [sum, count] = [sum - values[from], count - 1];
      from += 1;
    }
    return count ? sum / count : null;
  });
}
