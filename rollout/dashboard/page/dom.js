// Elements.  Everything that the server sends is put into the document as text or as a number, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const drawn = new Map();

export const $ = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map(
    (child) => child instanceof Node ? child : document.createTextNode(String(child))));
  return element;
}

export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Draw anew only where something has changed, so that text can be selected and lists keep their place.
export function put(id, facts, ...children) {
  const mark = JSON.stringify(facts);
  if (drawn.get(id) === mark) return;
  drawn.set(id, mark);
  $(id).replaceChildren(...children.map((make) => make()));
}

export function forgetDrawn() { drawn.clear(); }

export function text(id, value) { if ($(id).textContent !== value) $(id).textContent = value; }

export function clip(label, chars) {
  const found = Array.from(label);
  return found.length <= chars ? label : found.slice(0, Math.max(1, chars - 1)).join("") + "…";
}

export function button(name, act, question = null) {
  const made = h("button", { type: "button" }, name);
  let armed = 0;
  made.addEventListener("click", () => {
    if (question === null || Date.now() - armed < 5000 && made.classList.contains("asks")) {
      made.classList.remove("asks");
      made.textContent = name;
      act();
      return;
    }
    armed = Date.now();
    made.classList.add("asks");
    made.textContent = question;
    setTimeout(() => {
      made.classList.remove("asks");
      made.textContent = name;
    }, 5000);
  });
  return made;
}

// `columns`: [name, value of a row, kind].  Kinds: number, name and brief (cut, whole in the title), text.
export function table(columns, rows) {
  return h("table", {},
    h("thead", {}, h("tr", {}, ...columns.map(([name, , kind]) => h("th", { class: kind }, name)))),
    h("tbody", {}, ...rows.map((row) => h("tr", {}, ...columns.map(([label, value, kind]) => {
      const shown = value(row);
      const cut = kind === "text" && typeof shown === "string" ? clip(shown, 260) : shown;
      const isCut = kind === "name" || kind === "brief" || cut !== shown;
      return h("td", { class: kind, title: isCut && typeof shown === "string" ? shown : null, "data-label": label }, cut);
    })))));
}

// `rows`: [name, value].
export function tiles(rows) {
  put("tiles", rows, ...rows.map(([name, value]) => () => h("div", { class: "tile" }, h("span", {}, name), h("b", { title: value }, value))));
}

export function list(rows) {
  return h("dl", {}, ...rows.flatMap(([name, value, colour]) => [h("dt", {}, name), h("dd", { class: colour }, value)]));
}

export function meter(share, low = 0) {
  const bar = h("i", { class: share < low ? "low" : null });
  bar.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return h("div", { class: "meter" }, bar);
}

export function empty(words) { return h("p", { class: "empty" }, words); }
