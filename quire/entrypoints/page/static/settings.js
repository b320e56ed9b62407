// The panel beside a chat: system prompt, schema, tools, sampling parameters.

import { h } from "./dom.js";
import "./parameters.js";
import { parseJson, schemaProblem } from "./schema.js";

const SCHEMA = JSON.stringify({ type: "object", properties: { name: { type: "string" }, year: { type: "integer", minimum: 0 } }, required: ["name", "year"], additionalProperties: false }, null, 2);
const TOOL = JSON.stringify([{ type: "function", function: { name: "get_weather", description: "The weather in a city", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }], null, 2);

export function readSchema(text) {
  if (!text.trim()) return { value: null, error: null };
  const parsed = parseJson(text);
  return parsed.error ? parsed : { value: parsed.value, error: schemaProblem(parsed.value) };
}

export function readTools(text) {
  if (!text.trim()) return { value: null, error: null };
  const { value, error } = parseJson(text);
  if (error) return { value: undefined, error };
  const tools = Array.isArray(value) ? value : [value];
  for (const tool of tools) {
    const named = tool?.function ?? tool;
    if (typeof named?.name !== "string" || !/^[\w.-]{1,64}$/.test(named.name)) return { value: undefined, error: "each tool needs a name of letters, digits, _, - and . (at most 64)" };
    const problem = named.parameters === undefined ? null : schemaProblem(named.parameters, `the parameters of ${named.name}`);
    if (problem) return { value: undefined, error: problem };
  }
  return { value: tools.map((tool) => (tool.function ? { type: "function", ...tool } : { type: "function", function: tool })), error: null };
}

class Settings extends HTMLElement {
  show(chat, info, { changed, raw = false }) {
    const update = () => changed();
    const own = raw ? "raw-" : "";
    const parameters = h("q-parameters");
    parameters.show(chat.params, info, own, (values) => { chat.params = values; update(); });
    const reset = h("button", { class: "plain", type: "button", onclick: () => { chat.params = {}; this.show(chat, info, { changed, raw }); update(); } }, "Reset all");
    const parts = [];
    if (!raw) {
      const system = h("textarea", { id: "s-system", rows: "3", value: chat.system, placeholder: "You are …", oninput: () => { chat.system = system.value; update(); } });
      parts.push(h("section", {}, h("label", { for: "s-system", class: "title" }, "System prompt"), system));
    }
    parts.push(this.json(`${own}s-schema`, "JSON schema", "Answers must follow it.", chat.schema, SCHEMA, readSchema, "Valid schema", (text) => { chat.schema = text; update(); }));
    if (!raw) parts.push(this.json("s-tools", "Tools", "You type what they return.", chat.tools, TOOL, readTools, "Valid tools", (text) => { chat.tools = text; update(); }));
    parts.push(h("section", {}, h("div", { class: "row spread" }, h("h2", { class: "title" }, "Parameters"), reset), parameters));
    this.replaceChildren(...parts);
  }

  json(id, title, help, text, example, read, valid, changed) {
    const note = h("p", { class: "check", id: `${id}-note`, role: "status" });
    const check = () => {
      area.rows = Math.min(12, Math.max(2, area.value.split("\n").length));
      const { error } = read(area.value);
      const empty = !area.value.trim();
      fill.textContent = empty ? "Example" : "Clear";
      note.textContent = empty ? help : error ?? `✓ ${valid}`;
      note.classList.toggle("error", Boolean(error));
      area.setAttribute("aria-invalid", error ? "true" : "false");
    };
    const area = h("textarea", { id, class: "code", value: text, placeholder: "none", spellcheck: "false", "aria-describedby": note.id, oninput: () => { changed(area.value); check(); } });
    const fill = h("button", { class: "plain", type: "button", onclick: () => { area.value = area.value.trim() ? "" : example; changed(area.value); check(); } });
    fill.setAttribute("aria-label", `${title}: example or clear`);
    check();
    return h("section", {}, h("div", { class: "row spread" }, h("label", { for: id, class: "title" }, title), fill), area, note);
  }
}

customElements.define("q-settings", Settings);
