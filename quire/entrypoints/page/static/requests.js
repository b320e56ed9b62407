// Running and waiting requests, a row each: how much of the prompt was cached and computed, how far the output is.

import { count, h } from "./dom.js";

const MAX_ROWS = 128;
const WAITS = ["for room", "for its grammar", "for KV blocks from elsewhere", "for its sibling's prompt", "", ""];

export class RequestRows {
  constructor() {
    this.body = h("tbody");
    this.empty = h("p", { class: "quiet" }, "No requests.");
    this.more = h("p", { class: "quiet num" });
    this.table = h("table", { class: "num" },
      h("thead", {}, h("tr", {}, ["request", "prompt", "", "output", ""].map((text, i) => h("th", { scope: "col" }, text || h("span", { class: "hidden-text" }, i === 2 ? "prompt computed" : "output generated"))))), this.body);
    this.element = h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Requests" }, this.empty, this.table, this.more);
    this.rows = [];
  }

  row(i) {
    if (!this.rows[i]) {
      const parts = { id: h("th", { scope: "row" }), prompt: h("td"), promptBar: h("i"), output: h("td"), outputBar: h("i") };
      parts.element = h("tr", {}, parts.id, parts.prompt, h("td", { class: "track prompt" }, h("span", {}, parts.promptBar)), parts.output, h("td", { class: "track output" }, h("span", {}, parts.outputBar)));
      this.rows[i] = parts;
    }
    return this.rows[i];
  }

  // running: [id, prompt, computed, tokens, limit, cached]; waiting: [id, prompt, tokens, state]
  show(running, waiting, stats) {
    const shown = running.slice(0, MAX_ROWS);
    const queued = waiting.slice(0, Math.max(0, MAX_ROWS - shown.length));
    shown.forEach(([id, prompt, computed, tokens, limit, cached], i) => {
      const row = this.row(i);
      const done = Math.min(computed, prompt);
      const output = Math.max(0, tokens - prompt), most = Math.max(1, limit - prompt);
      text(row.id, `#${id}`);
      text(row.prompt, cached > 0 ? `${count(prompt)} (${count(cached)} cached)` : count(prompt));
      bar(row.promptBar, done / Math.max(1, prompt), Math.max(0, cached) / Math.max(1, prompt));
      text(row.output, `${count(output)} / ${count(most)}`);
      bar(row.outputBar, output / most, 0);
      state(row.element, done < prompt ? "prefill" : "decode");
    });
    queued.forEach(([id, prompt, tokens, waits], i) => {
      const row = this.row(shown.length + i);
      text(row.id, `#${id}`);
      text(row.prompt, count(prompt));
      bar(row.promptBar, 0, 0);
      text(row.output, tokens > prompt ? `${count(tokens - prompt)}, preempted` : `waits ${WAITS[waits] ?? ""}`);
      bar(row.outputBar, 0, 0);
      state(row.element, "waits");
    });
    const total = shown.length + queued.length;
    if (this.body.children.length !== total) this.body.replaceChildren(...this.rows.slice(0, total).map((row) => row.element));
    this.empty.hidden = total > 0;
    this.table.hidden = total === 0;
    const left = stats.num_running + stats.num_waiting - total;
    text(this.more, left > 0 ? `and ${count(left)} more` : "");
  }
}

function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

function state(element, value) {
  if (element.className !== value) element.className = value;
}

function bar(element, part, cached) {
  element.style.setProperty("--part", part.toFixed(3));
  element.style.setProperty("--cached-part", cached.toFixed(3));
}
