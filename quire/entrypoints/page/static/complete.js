// Raw completions: a text goes in as it is, and its tokens come out.

import { call, chunks, key } from "./api.js";
import { announce, copy, count, h, seconds } from "./dom.js";
import { toBody } from "./parameters.js";
import { readSchema } from "./settings.js";
import { curl, python } from "./snippets.js";
import { completionTokens, legend } from "./tokens.js";

const PATH = "v1/completions";
const STORED = "quire.complete";

class Complete extends HTMLElement {
  start(info, shell) {
    Object.assign(this, { info, shell, running: null });
    this.state = { prompt: "The three laws of robotics are", params: { max_tokens: "64", logprobs: "5" }, schema: "", system: "", tools: "" };
    try {
      Object.assign(this.state, JSON.parse(localStorage.getItem(STORED) ?? "{}"));
    } catch { /* begin anew */ }
    const state = this.state;
    this.prompt = h("textarea", { id: "prompt", class: "code", rows: "8", value: state.prompt, spellcheck: "false", oninput: () => { state.prompt = this.prompt.value; this.save(); this.countTokens(); } });
    this.prompt.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.run(); });
    this.size = h("span", { class: "quiet num", role: "status" });
    this.boundaries = h("q-tokens");
    this.shown = h("details", { class: "prompt-tokens" }, h("summary", {}, "Token boundaries of the prompt"), this.boundaries);
    this.shown.addEventListener("toggle", () => this.countTokens());
    this.go = h("button", { class: "button main", type: "button", onclick: () => (this.running ? this.running.abort() : this.run()) }, "Complete");
    const asCurl = h("button", { class: "plain", type: "button", onclick: () => this.copyAs(curl, asCurl) }, "Copy as curl");
    const asPython = h("button", { class: "plain", type: "button", onclick: () => this.copyAs(python, asPython) }, "Copy as Python");
    this.results = h("div", { class: "results" });
    this.problem = h("p", { class: "error", role: "alert" });
    this.settings = h("q-settings", { "aria-label": "Settings", role: "complementary" });
    this.replaceChildren(h("section", { class: "raw" }, h("div", { class: "row spread" }, h("label", { for: "prompt", class: "title" }, "Prompt"), this.size), this.prompt, this.shown,
      h("div", { class: "row" }, this.go, asCurl, asPython), this.problem, this.results), this.settings);
    this.settings.show(state, info, { raw: true, changed: () => this.save() });
    this.countTokens();
  }

  save() {
    localStorage.setItem(STORED, JSON.stringify(this.state));
  }

  countTokens() {
    clearTimeout(this.counting);
    this.counting = setTimeout(async () => {
      const prompt = this.state.prompt;
      try {
        const body = { prompt: prompt || " ", return_token_offsets: true, truncate_prompt_tokens: -1 };
        const [found] = await (await call("v1/completions/render", { body })).json();
        this.size.textContent = `${count(prompt ? found.token_ids.length : 0)} tokens`;
        const characters = [...prompt];
        const texts = found.token_offsets.map(([from, to]) => characters.slice(from, to).join(""));
        if (this.shown.open) this.boundaries.show(texts.slice(0, 4000).map((text) => ({ text, logprob: null })), { boundaries: true });
      } catch (error) {
        this.size.textContent = error.message;
      }
    }, 250);
  }

  body() {
    const parameters = toBody(this.state.params);
    const { value, error } = readSchema(this.state.schema);
    if (error) throw new Error(`The JSON schema: ${error}.`);
    const body = { model: this.shell.model(), prompt: this.state.prompt, ...parameters };
    if (value !== null) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: value, strict: true } };
    return body;
  }

  copyAs(make, button) {
    try {
      copy(make(PATH, this.body(), Boolean(key())), button);
    } catch (error) {
      this.problem.textContent = error.message;
    }
  }

  async run(prompt = this.state.prompt, kept = []) {
    if (this.running) return;
    this.problem.textContent = "";
    let body;
    try {
      body = { ...this.body(), prompt };
    } catch (error) {
      this.problem.textContent = error.message;
      return;
    }
    const abort = this.running = new AbortController();
    this.go.textContent = "Stop";
    const choices = new Map();
    this.results.replaceChildren(legend());
    const began = performance.now();
    let first = 0, last = 0, tokens = 0;
    const place = (index) => {
      if (!choices.has(index)) {
        const element = h("q-tokens");
        const facts = h("p", { class: "quiet num" });
        this.results.append(h("article", {}, element, facts));
        choices.set(index, { element, facts, tokens: [...kept], text: "" });
      }
      return choices.get(index);
    };
    let frame = 0;
    const draw = (done = false) => {
      frame = 0;
      for (const choice of choices.values()) {
        const shown = choice.tokens.length ? choice.tokens : [{ text: choice.text, logprob: null }];
        const continueFrom = done && choice.tokens.length ? (i, text) => {
          const before = choice.tokens.slice(0, i);
          const own = { ...choice.tokens[i], text };
          this.run(this.state.prompt + before.map((token) => token.text).join("") + text, [...before, own]);
        } : null;
        choice.element.show(choice.tokens.length ? choice.tokens : shown, { boundaries: true, continueFrom });
        if (!choice.tokens.length) choice.element.shownTokens = null;
        const rate = last > first + 50 ? (tokens - 1) / ((last - first) / 1e3) : 0;
        choice.facts.textContent = [tokens && `${count(tokens)} tokens`, rate && `${rate.toFixed(0)} tok/s`, first && `first after ${seconds((first - began) / 1e3)}`, choice.finish && `ended by ${choice.finish}`].filter(Boolean).join(" · ");
      }
    };
    try {
      for await (const chunk of chunks(PATH, body, abort.signal)) {
        if (chunk.usage) tokens = chunk.usage.completion_tokens;
        for (const each of chunk.choices ?? []) {
          const choice = place(each.index);
          if (each.text || each.logprobs) {
            first ||= performance.now();
            last = performance.now();
            tokens += 1;
          }
          choice.text += each.text ?? "";
          choice.tokens.push(...completionTokens(each.logprobs));
          if (each.finish_reason) choice.finish = each.finish_reason;
        }
        if (!frame) frame = requestAnimationFrame(() => draw());
      }
      announce(`Completion done, ${tokens} tokens.`);
    } catch (error) {
      if (error.name !== "AbortError") {
        this.problem.textContent = error.message;
        this.shell.failed(error);
      }
    }
    cancelAnimationFrame(frame);
    draw(true);
    this.running = null;
    this.go.textContent = "Complete";
  }
}

customElements.define("q-complete", Complete);
