// One message of a chat: how it is shown, and what can be done with it.

import { copy, count, h, seconds } from "./dom.js";
import { Markdown } from "./markdown.js";
import { parseJson, violation } from "./schema.js";
import { legend } from "./tokens.js";

const ENDS = { length: "stopped at the length limit", abort: "aborted", stopped: "stopped by you", repetition: "stopped: it repeats itself" };

class Message extends HTMLElement {
  // actions: edit(text), regenerate(), branch(step), continueFrom(i, text), results([{id, content}]), copyAs(kind)
  show(node, { actions, siblings, index, schema, busy }) {
    Object.assign(this, { node, actions, schema });
    this.className = node.role;
    this.text = h("div", { class: "text" });
    this.thinking = h("div", { class: "text" });
    this.folded = h("details", { class: "reasoning", hidden: true }, h("summary", {}, "Reasoning"), this.thinking);
    this.calls = h("div", { class: "calls" });
    this.tokens = h("q-tokens", { hidden: true });
    this.note = h("p", { class: "note", role: "status" });
    this.facts = h("span", { class: "facts num" });
    this.bar = h("div", { class: "bar" });
    const who = { user: "You", assistant: "Answer", tool: "Tool result" }[node.role];
    this.replaceChildren(h("h3", { class: "who" }, who), this.folded, this.text, this.tokens, this.calls, this.note, this.bar);
    this.markdown = node.role === "assistant" ? new Markdown(this.text) : null;
    this.thought = new Markdown(this.thinking);
    if (node.role === "assistant") this.setAttribute("aria-busy", String(busy));
    if (node.role !== "assistant") this.text.textContent = node.content;
    else this.update(!busy);
    this.showBar(siblings, index, busy);
  }

  update(done) {
    const node = this.node;
    this.markdown.update(this.schema && !node.tool_calls?.length ? asJson(node.content, done) : node.content, done);
    if (node.reasoning) {
      this.folded.hidden = false;
      this.thought.update(node.reasoning, done);
      this.folded.querySelector("summary").textContent = done || node.content ? "Reasoning" : "Reasoning …";
    }
    const tokens = node.tokens ?? [];
    const coloured = tokens.length > 0;
    this.tokens.hidden = !coloured;
    this.text.hidden = coloured && !this.plain;
    if (coloured) {
      if (!this.legend) {
        const toggle = h("button", { class: "plain", type: "button", onclick: () => { this.plain = !this.plain; toggle.textContent = this.plain ? "Show tokens" : "Show text"; this.update(true); } }, "Show text");
        this.legend = h("div", { class: "row legend-row" }, legend(), toggle);
        this.tokens.before(this.legend);
      }
      this.tokens.hidden = Boolean(this.plain);
      this.tokens.show(tokens, { continueFrom: done && !node.tool_calls?.length ? this.actions.continueFrom : null });
    }
    if (done) this.finish();
    else this.showFacts();
  }

  finish() {
    const node = this.node;
    this.setAttribute("aria-busy", "false");
    this.showFacts();
    this.showCalls();
    this.note.classList.toggle("error", Boolean(node.error));
    this.note.textContent = node.error ?? ENDS[node.finish] ?? "";
    if (!node.error && this.schema && node.content && !node.tool_calls?.length) {
      const { value, error } = parseJson(node.content);
      const check = () => {
        try {
          return violation(value, this.schema);
        } catch (problem) { // a part of the schema that is not looked at before
          return problem.message;
        }
      };
      const problem = error ?? check();
      this.note.textContent = [this.note.textContent, problem ? `Not of the schema: ${problem}` : "✓ follows the schema"].filter(Boolean).join(" · ");
    }
  }

  showFacts() {
    const stats = this.node.stats ?? {};
    const parts = [];
    if (stats.tokens) parts.push(`${count(stats.tokens)} tokens`);
    if (stats.rate) parts.push(`${stats.rate.toFixed(stats.rate < 10 ? 1 : 0)} tok/s`);
    if (stats.first) parts.push(`first after ${seconds(stats.first)}`);
    this.facts.textContent = parts.join(" · ");
  }

  showBar(siblings, index, busy) {
    const node = this.node;
    const button = (label, onclick, more = {}) => h("button", { class: "plain", type: "button", onclick, ...more }, label);
    const branch = siblings > 1 ? h("span", { class: "branch num" },
      button("‹", () => this.actions.branch(-1), { "aria-label": "Previous version", disabled: busy || index === 0 }), `${index + 1} / ${siblings}`,
      button("›", () => this.actions.branch(1), { "aria-label": "Next version", disabled: busy || index === siblings - 1 })) : null;
    const copied = button("Copy", () => copy(node.content, copied));
    const own = node.role === "user" ? [button("Edit", () => this.edit(), { disabled: busy })]
      : node.role === "assistant" ? [this.more(button), button("Regenerate", () => this.actions.regenerate(), { disabled: busy })] : [];
    this.bar.replaceChildren(...[branch, copied, ...own, this.facts].filter(Boolean));
  }

  more(button) {
    const curl = button("as curl", () => this.actions.copyAs("curl", curl), { "aria-label": "Copy as curl" });
    const python = button("as Python", () => this.actions.copyAs("python", python), { "aria-label": "Copy as Python" });
    return h("span", { class: "branch" }, curl, python);
  }

  edit() {
    const area = h("textarea", { value: this.node.content, rows: String(Math.min(12, this.node.content.split("\n").length + 1)), "aria-label": "Edit your message" });
    const leave = () => { form.replaceWith(this.text); this.bar.hidden = false; };
    const send = () => { if (area.value.trim()) this.actions.edit(area.value); };
    const form = h("form", { class: "editor", onsubmit: (event) => { event.preventDefault(); send(); } }, area,
      h("div", { class: "row" }, h("button", { class: "button main", type: "submit" }, "Send as a new branch"), h("button", { class: "button", type: "button", onclick: leave }, "Cancel")));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
    });
    this.text.replaceWith(form);
    this.bar.hidden = true;
    area.focus();
  }

  showCalls() {
    const calls = this.node.tool_calls ?? [];
    if (!calls.length) return this.calls.replaceChildren();
    const fields = calls.map((call, i) => {
      const area = h("textarea", { class: "code", rows: "3", id: `${this.node.id}-${i}`, placeholder: '{"result": …}' });
      return { call, area, element: h("div", { class: "call" },
        h("p", {}, h("span", { class: "quiet" }, "calls "), h("b", { class: "mono" }, call.function.name)),
        h("pre", { class: "mono", tabindex: "0", role: "region", "aria-label": `Arguments of ${call.function.name}` }, pretty(call.function.arguments)),
        this.node.answered ? null : h("label", { for: area.id }, "Its result"), this.node.answered ? null : area) };
    });
    const submit = (event) => { event.preventDefault(); this.actions.results(fields.map(({ call, area }) => ({ id: call.id, content: area.value }))); };
    return this.calls.replaceChildren(h("form", { onsubmit: submit }, fields.map((field) => field.element), this.node.answered ? null : h("button", { class: "button main", type: "submit" }, calls.length > 1 ? "Send results" : "Send result")));
  }
}

// An answer by a schema is code.
const asJson = (text, done) => `\`\`\`json\n${done ? pretty(text) : text}`;

function pretty(text) {
  const { value, error } = parseJson(text);
  return error ? text : JSON.stringify(value, null, 2);
}

customElements.define("q-message", Message);
