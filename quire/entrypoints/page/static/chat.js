// The playground: several chats, their branches, and what the server streams into them.

import { chunks, key } from "./api.js";
import { announce, copy, h, icon } from "./dom.js";
import "./message.js";
import { toBody } from "./parameters.js";
import { readSchema, readTools } from "./settings.js";
import { curl, python } from "./snippets.js";
import { addNode, Chats, children, messages, path } from "./store.js";
import { chatTokens, joined } from "./tokens.js";

const PATH = "v1/chat/completions";
const MEASURABLE = 50; // milliseconds from the first to the last token, below which there is no rate to speak of
const IDEAS = ["Explain how a paged KV cache works, in three sentences.", "Write a Python function that merges two sorted lists.", "Derive the quadratic formula, with LaTeX.", "A limerick about a patient scheduler."];

class Chat extends HTMLElement {
  start(info, shell) {
    Object.assign(this, { info, shell, store: new Chats(), running: null, following: true, lastTop: 0, sizes: new ResizeObserver(() => this.follow()) });
    this.list = h("nav", { class: "chats", "aria-label": "Chats" });
    this.log = h("div", { class: "log", role: "log", "aria-live": "off", "aria-label": "Conversation", tabindex: "0", onscroll: () => this.scrolled() });
    this.input = h("textarea", { id: "ask", rows: "1", placeholder: "Ask something", "aria-label": "Your message", oninput: () => { this.store.active.draft = this.input.value; this.grow(); } });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    this.go = h("button", { class: "button main go", type: "submit", "aria-label": "Send" }, icon("up"));
    this.problem = h("p", { class: "error", role: "alert" });
    const form = h("form", { class: "ask", onsubmit: (event) => { event.preventDefault(); if (this.running) this.stop(); else this.send(); } }, h("div", { class: "box" }, this.input, this.go), this.problem);
    this.settings = h("q-settings", { "aria-label": "Settings", role: "complementary" });
    this.replaceChildren(this.list, h("section", { class: "talk" }, this.log, form), this.settings);
    this.addEventListener("keydown", (event) => { if (event.key === "Escape" && this.running) this.stop(); });
    addEventListener("beforeunload", () => this.store.save());
    this.open(this.store.active);
  }

  get chat() { return this.store.active; }

  open(chat) {
    this.stop();
    this.store.active = chat;
    this.input.value = chat.draft ?? "";
    this.showList();
    this.settings.show(chat, this.info, { changed: () => this.save() });
    this.render();
    this.grow();
    this.save();
  }

  save() {
    clearTimeout(this.saving);
    this.saving = setTimeout(() => {
      this.store.save();
      if (this.store.full) this.problem.textContent = "The browser's storage is full: delete a chat to keep this one.";
    }, 300);
  }

  showList() {
    const add = h("button", { class: "button", type: "button", onclick: () => { this.open(this.store.add()); this.shell.close(); this.input.focus(); } }, "New chat");
    const rows = this.store.chats.map((chat) => h("li", { class: chat === this.chat ? "here" : "" },
      h("button", { type: "button", "aria-current": chat === this.chat ? "page" : null, onclick: () => { this.open(chat); this.shell.close(); } }, chat.title || "New chat"),
      h("button", { class: "icon", type: "button", "aria-label": `Delete ${chat.title || "New chat"}`, onclick: () => this.remove(chat) }, icon("bin"))));
    this.list.replaceChildren(add, h("ul", {}, rows), h("p", { class: "quiet" }, "Chats stay in this browser."));
  }

  remove(chat) {
    if (Object.keys(chat.nodes).length && !confirm(`Delete “${chat.title}”?`)) return;
    this.store.remove(chat);
    this.open(this.store.active);
  }

  grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  render() {
    const shown = path(this.chat);
    const { value: schema } = readSchema(this.chat.schema);
    if (!shown.length) {
      const ideas = IDEAS.map((text) => h("li", {}, h("button", { type: "button", onclick: () => { this.input.value = text; this.send(); } }, text)));
      this.log.replaceChildren(h("div", { class: "welcome" }, h("h1", {}, "What would you like to ask?"), h("p", { class: "quiet" }, `${this.shell.model()} answers on this server. Nothing leaves it.`), h("ul", {}, ideas)));
      return;
    }
    this.log.replaceChildren(...shown.map((node) => {
      const element = h("q-message");
      const all = children(this.chat, node.parent);
      element.show(node, { actions: this.actions(node), siblings: all.length, index: all.indexOf(node), schema, busy: this.running?.node === node });
      this.elements ??= new WeakMap();
      this.elements.set(node, element);
      return element;
    }));
    // A message has its true height only once it is near the window.
    this.sizes.disconnect();
    this.sizes.observe(this.log.lastElementChild);
    this.follow(true);
  }

  actions(node) {
    const chat = this.chat;
    return {
      edit: (text) => this.answer(addNode(chat, node.parent, { role: "user", content: text })),
      regenerate: () => this.answer(chat.nodes[node.parent] ?? null),
      branch: (step) => {
        const all = children(chat, node.parent);
        chat.chosen[node.parent] = all[all.indexOf(node) + step].id;
        this.render();
        this.save();
      },
      continueFrom: (index, text) => {
        const kept = node.tokens.slice(0, index);
        this.answer(chat.nodes[node.parent], { prefix: joined([...kept, node.tokens[index].top.find((each) => each.text === text) ?? node.tokens[index]]), tokens: [...kept, { ...node.tokens[index], text, logprob: node.tokens[index].top.find((each) => each.text === text)?.logprob ?? node.tokens[index].logprob }] });
      },
      results: (results) => {
        node.answered = true;
        let last = node;
        for (const { id, content } of results) last = addNode(chat, last.id, { role: "tool", tool_call_id: id, content });
        this.answer(last);
      },
      copyAs: (kind, button) => {
        try {
          const body = this.body(chat.nodes[node.parent] ?? null);
          copy((kind === "curl" ? curl : python)(PATH, body, Boolean(key())), button);
        } catch (error) {
          this.problem.textContent = error.message;
        }
      },
    };
  }

  send() {
    const text = this.input.value.trim();
    if (!text || this.running) return;
    const before = path(this.chat).at(-1);
    const node = addNode(this.chat, before?.id ?? "root", { role: "user", content: text });
    if (!this.chat.title) this.chat.title = text.slice(0, 60);
    this.input.value = this.chat.draft = "";
    this.grow();
    this.showList();
    this.answer(node);
  }

  body(parent, prefix = null) {
    const chat = this.chat;
    const { n: _n, prompt_logprobs: _p, logprobs, ...parameters } = toBody(chat.params);
    const body = { model: this.shell.model(), messages: parent ? messages(chat, parent) : messages(chat, null), ...parameters };
    if (logprobs !== undefined) Object.assign(body, { logprobs: true, top_logprobs: logprobs });
    const schema = readSchema(chat.schema);
    if (schema.error) throw new Error(`The JSON schema: ${schema.error}.`);
    if (schema.value !== null) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: schema.value, strict: true } };
    const tools = readTools(chat.tools);
    if (tools.error) throw new Error(`The tools: ${tools.error}.`);
    if (tools.value?.length) body.tools = tools.value;
    if (prefix !== null) {
      body.messages = [...body.messages, { role: "assistant", content: prefix }];
      Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    }
    return body;
  }

  async answer(parent, { prefix = null, tokens = null } = {}) {
    this.problem.textContent = "";
    let body;
    try {
      body = this.body(parent, prefix);
    } catch (error) {
      this.problem.textContent = error.message;
      this.render();
      return;
    }
    const node = addNode(this.chat, parent?.id ?? "root", { role: "assistant", content: prefix ?? "", reasoning: "", stats: {} });
    if (tokens) node.tokens = [...tokens];
    const running = this.running = { node, abort: new AbortController(), chat: this.chat };
    this.render();
    this.showGo();
    const element = this.elements.get(node);
    const began = performance.now();
    let first = 0, pieces = 0, frame = 0, cost = 0, shownAt = 0;
    const draw = () => {
      frame = 0;
      const now = performance.now();
      if (now - shownAt < Math.max(33, 5 * cost)) { // long blocks are shown less often, so that the page stays smooth
        frame = requestAnimationFrame(draw);
        return;
      }
      element.update(false);
      this.follow();
      shownAt = performance.now();
      cost = shownAt - now;
    };
    try {
      for await (const chunk of chunks(PATH, body, running.abort.signal)) {
        const choice = chunk.choices?.[0];
        const now = performance.now();
        if (chunk.usage) node.stats.tokens = chunk.usage.completion_tokens;
        if (!choice) continue;
        const delta = choice.delta ?? {};
        const thought = delta.reasoning_content ?? delta.reasoning;
        if (delta.content || thought || delta.tool_calls?.length) {
          pieces += 1;
          if (!first) {
            first = now;
            node.stats.first = (now - began) / 1e3;
          }
          node.stats.tokens = Math.max(node.stats.tokens ?? 0, pieces);
          if (now > first + MEASURABLE) node.stats.rate = (node.stats.tokens - 1) / ((now - first) / 1e3);
        }
        if (thought) node.reasoning += thought;
        if (delta.content) node.content += delta.content;
        if (choice.logprobs) node.tokens = [...(node.tokens ?? []), ...chatTokens(choice.logprobs)];
        for (const call of delta.tool_calls ?? []) addCall(node, call);
        if (choice.finish_reason) {
          node.finish = choice.finish_reason;
          node.stats.last = now;
        }
        if (!frame) frame = requestAnimationFrame(draw);
      }
      if (first && node.stats.last > first + MEASURABLE) node.stats.rate = Math.max(0, node.stats.tokens - 1) / ((node.stats.last - first) / 1e3);
      delete node.stats.last;
      announce(`Answer complete, ${node.stats.tokens ?? 0} tokens.`);
    } catch (error) {
      if (error.name === "AbortError") {
        node.finish = "stopped";
        announce("Stopped.");
      } else {
        node.error = `${error.message}${node.content ? " What had arrived is kept." : ""}`;
        announce(node.error);
        this.shell.failed(error);
      }
    }
    cancelAnimationFrame(frame);
    if (this.running === running) this.running = null;
    this.showGo();
    this.store.save();
    if (this.store.active === running.chat) {
      element.update(true);
      const all = children(running.chat, node.parent);
      element.showBar(all.length, all.indexOf(node), false);
      for (const other of this.log.querySelectorAll("q-message .bar button")) if (other.textContent !== "‹" && other.textContent !== "›") other.disabled = false;
      this.follow();
    }
  }

  stop() {
    this.running?.abort.abort();
  }

  showGo() {
    this.go.replaceChildren(icon(this.running ? "stop" : "up"));
    this.go.setAttribute("aria-label", this.running ? "Stop" : "Send");
    this.go.classList.toggle("stop", Boolean(this.running));
  }

  // Keep the newest text in view, unless the reader has scrolled up.
  follow(force = false) {
    this.following ||= force;
    if (this.following) this.log.scrollTop = this.log.scrollHeight;
  }

  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.log;
    if (scrollHeight - scrollTop - clientHeight < 160) this.following = true;
    else if (scrollTop < this.lastTop - 4) this.following = false; // text that was added moves nothing up
    this.lastTop = scrollTop;
  }
}

function addCall(node, delta) {
  node.tool_calls ??= [];
  const call = (node.tool_calls[delta.index ?? 0] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  if (delta.id) call.id = delta.id;
  if (delta.function?.name) call.function.name += delta.function.name;
  if (delta.function?.arguments) call.function.arguments += delta.function.arguments;
}

customElements.define("q-chat", Chat);
