// Numbers as people read them.

export function short(value) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= size) {
      const scaled = value / (unit === "k" ? 1e3 : size);
      return scaled.toFixed(scaled < 100 && scaled % 1 ? 1 : 0) + unit;
    }
  }
  return value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 10 ? 1 : 0 });
}

export const whole = (value) => Math.round(value).toLocaleString("en");
export const percent = (share, digits = 1) => (100 * share).toFixed(digits) + " %";
export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en", { hourCycle: "h23" });

// At most four digits that matter, for numbers of any size.
export function precise(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return String(+value.toPrecision(4));
}

export function seconds(value) {
  const rounded = Math.round(value);
  if (value >= 90) return `${Math.floor(rounded / 60)} min ${rounded % 60} s`;
  if (value >= 10) return value.toFixed(0) + " s";
  return value >= 1 ? value.toFixed(1) + " s" : (1000 * value).toFixed(value < 0.01 ? 1 : 0) + " ms";
}

export function upTime(value) {
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (value >= 2 * size) return `${Math.floor(value / size)} ${unit}`;
  }
  return `${Math.floor(value)} s`;
}

export function bytes(value) {
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return (value / size).toFixed(1) + " " + unit;
  }
  return Math.round(value) + " B";
}

// The values of an axis from 0 to beyond `top`, or from `low` below it.  Of bytes they are powers of two.
export function ticks(top, low = 0, isBinary = false) {
  if (!(top > low)) return [low, low + 1];
  const rough = (top - low) / 3, size = 10 ** Math.floor(Math.log10(rough));
  const step = isBinary ? 2 ** Math.ceil(Math.log2(rough)) : [1, 2, 2.5, 5, 10].map((n) => n * size).find((n) => n >= rough * (1 - 1e-9));
  const found = [], first = Math.floor(low / step + 1e-9);
  for (let n = first; n * step < top + step * (1 - 1e-9); n += 1) found.push(+(n * step).toPrecision(12));
  return found;
}
