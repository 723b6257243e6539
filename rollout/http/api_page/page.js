"use strict";
// Everything that the server sends is put into the document as text, never as markup.
(() => {
  const $ = (id) => document.getElementById(id);
  let key = null;

  function h(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(name, value);
    element.append(...children.filter((child) => child !== null));
    return element;
  }

  const headers = () => key === null ? {} : { Authorization: `Bearer ${key}` };

  function notice(words) {
    $("notice").hidden = words === null;
    $("notice").textContent = words ?? "";
  }

  function resolved(schema, all) {
    const name = schema?.$ref?.split("/").pop();
    return name === undefined ? schema ?? {} : all[name] ?? {};
  }

  // The type of a field in a few words.
  function kind(schema, all) {
    const one = resolved(schema, all);
    if (one.enum) return one.enum.map((value) => JSON.stringify(value)).join(" or ");
    if (one.const !== undefined) return JSON.stringify(one.const);
    const many = one.anyOf ?? one.oneOf;
    if (many) return [...new Set(many.map((each) => kind(each, all)))].join(" or ");
    if (one.type === "array") return `list of ${kind(one.items ?? {}, all)}`;
    return one.type ?? "anything";
  }

  function fields(title, rows) {
    if (!rows.length) return null;
    const line = ([name, type, preset, text]) => h("tr", {}, h("td", {}, h("code", {}, name)), h("td", {}, type), h("td", {}, preset), h("td", {}, text));
    return h("div", {}, h("table", {}, h("thead", {}, h("tr", {}, ...[title, "type", "default", ""].map((word) => h("th", {}, word)))),
      h("tbody", {}, ...rows.map(line))));
  }

  function bodyFields(operation, all) {
    const content = operation.requestBody?.content ?? {};
    const schema = resolved(content["application/json"]?.schema, all), required = new Set(schema.required ?? []);
    return Object.entries(schema.properties ?? {}).map(([name, one]) => [
      name, kind(one, all), required.has(name) ? "required" : one.default === undefined ? "" : JSON.stringify(one.default), one.description ?? ""]);
  }

  function parameters(operation, all) {
    return (operation.parameters ?? []).map((one) => [
      one.name, kind(one.schema, all), one.schema?.default === undefined ? one.required ? "required" : "" : JSON.stringify(one.schema.default), one.in]);
  }

  function attempt(method, path) {
    const address = h("input", { value: path, "aria-label": "Path" });
    const body = method === "GET" ? null : h("textarea", { "aria-label": "Body", spellcheck: "false" }, "{}");
    const send = h("button", { type: "button" }, "Send"), answer = h("pre");
    address.style.width = "60%";
    send.addEventListener("click", async () => {
      answer.textContent = "…";
      try {
        const options = { method, headers: { ...headers(), ...(body === null ? {} : { "Content-Type": "application/json" }) } };
        if (body !== null) options.body = body.value;
        const response = await fetch(address.value.replace(/^\//, ""), { ...options, redirect: "error" });
        const text = await response.text();
        answer.textContent = `${response.status}\n${text.length > 20000 ? text.slice(0, 20000) + "…" : text}`;
      } catch (error) {
        answer.textContent = error.message;
      }
    });
    return h("div", { class: "try" }, address, " ", send, body, answer);
  }

  function endpoint(method, path, operation, all) {
    const text = operation.description ?? operation.summary ?? "";
    const rows = [...parameters(operation, all), ...bodyFields(operation, all)];
    const made = h("details", { "data-words": [method, path, text, ...rows.map(([name]) => name)].join(" ").toLowerCase() },
      h("summary", {}, h("b", {}, method), " ", h("code", {}, path), " ", h("span", { class: "quiet" }, text.split("\n")[0])));
    made.addEventListener("toggle", () => {
      if (made.childElementCount > 1) return;
      made.append(...[h("p", {}, text), fields("parameter", parameters(operation, all)), fields("field of the body", bodyFields(operation, all)),
        attempt(method, path)].filter((part) => part !== null));
    });
    return made;
  }

  function show(schema) {
    const groups = new Map(), all = schema.components?.schemas ?? {};
    for (const [path, operations] of Object.entries(schema.paths)) {
      for (const [method, operation] of Object.entries(operations)) {
        const name = operation.tags?.[0] ?? "other";
        groups.set(name, [...groups.get(name) ?? [], endpoint(method.toUpperCase(), path, operation, all)]);
      }
    }
    $("version").textContent = schema.info.version;
    $("filter").hidden = false;
    $("main").replaceChildren(...[...groups].map(([name, endpoints]) => h("section", {}, h("h2", {}, name), ...endpoints)));
  }

  $("filter").addEventListener("input", () => {
    const wanted = $("filter").value.trim().toLowerCase();
    for (const section of $("main").children) {
      const found = [...section.querySelectorAll("details")].filter((one) => !(one.hidden = !one.dataset.words.includes(wanted)));
      section.hidden = !found.length;
    }
  });

  async function load() {
    try {
      const response = await fetch("openapi.json", { headers: headers(), cache: "no-store", redirect: "error" });
      if (response.status === 401) {
        notice(key === null ? null : "The server does not take this key.");
        key = null;
        $("keys").hidden = false;
        $("key").focus();
        return;
      }
      const body = await response.json();
      if (!response.ok) throw new Error(body?.error?.message ?? `status ${response.status}`);
      notice(null);
      show(body);
    } catch (error) {
      notice(`No answer from the server: ${error.message}`);
    }
  }

  $("keys").addEventListener("submit", (event) => {
    event.preventDefault();
    key = $("key").value.trim();
    $("key").value = "";
    $("keys").hidden = true;
    load();
  });
  load();
})();
