// What the engine is doing while it does it.

import { call, events } from "./api.js";
import { applyStates, drawBlocks, groupOf, KINDS, kindOf } from "./blockmap.js";
import { announce, count, download, h, reducedMotion, seconds } from "./dom.js";
import { drawTimes, drawTokens } from "./plot.js";
import { readRecording, Recorder } from "./recording.js";
import { RequestRows } from "./requests.js";

const SPAN = 30; // seconds in the plots
const FIGURES = [["running", "running"], ["waiting", "waiting"], ["generated", "tokens/s generated"], ["prompt", "prompt tokens/s"], ["cache", "of the KV cache in use"], ["hits", "of prompt tokens cached"], ["preempted", "preemptions"]];
const LATENCIES = [["first_token", "First token"], ["between_tokens", "Between tokens"], ["queue", "In the queue"], ["whole", "Whole request"]];

class View extends HTMLElement {
  start(info, shell) {
    Object.assign(this, { info, shell, steps: [], history: [], map: new Uint8Array(0), recorder: new Recorder(), paused: false });
    this.figures = new Map(FIGURES.map(([name]) => [name, h("dd", { class: "num" }, "–")]));
    this.status = h("p", { class: "state", role: "status" });
    this.tokens = h("canvas", { role: "img", "aria-label": "Tokens of each step: prompt tokens, generated tokens and drafts" });
    this.times = h("canvas", { role: "img", "aria-label": "Time of each step" });
    this.blocks = h("canvas", { class: "blocks", role: "img", "aria-label": "Map of the KV cache's blocks; the counts are below" });
    this.tokensTop = h("span", { class: "top num" });
    this.timesTop = h("span", { class: "top num" });
    this.legend = h("ul", { class: "kinds" });
    this.rows = new RequestRows();
    this.latency = h("tbody");
    this.extra = h("div", { class: "extra" });
    this.pause = h("button", { class: "button", type: "button", onclick: () => this.togglePause() }, "Pause");
    this.save = h("button", { class: "button", type: "button", onclick: () => this.saveRecording() }, "Save the last minute");
    const file = h("input", { type: "file", accept: ".gz,.json", class: "hidden-text", id: "recording", tabindex: "-1", "aria-label": "Recording", onchange: () => file.files[0] && this.play(file.files[0]) });
    this.openFile = h("button", { class: "button", type: "button", onclick: () => file.click() }, "Play a recording");
    this.position = h("input", { type: "range", min: "0", max: "0", value: "0", "aria-label": "Position in the recording", oninput: () => { this.seek(Number(this.position.value)); this.advance(); } });
    this.player = h("div", { class: "player", hidden: true }, this.position);
    const key = (name, text) => h("span", {}, h("i", { class: `dot ${name}` }), text);
    this.replaceChildren(
      h("div", { class: "top-row" }, h("h1", {}, "Engine"), this.status, h("div", { class: "row" }, this.pause, this.save, this.openFile, file)), this.player,
      h("dl", { class: "figures" }, FIGURES.map(([name, label]) => h("div", {}, this.figures.get(name), h("dt", {}, label)))),
      h("div", { class: "plots" },
        h("section", { class: "plot" }, h("h2", {}, "Tokens in each step"), h("p", { class: "keys" }, key("prefill", "prompt"), key("decode", "generated"), key("draft", "drafts")), h("div", { class: "frame" }, this.tokensTop, this.tokens), axis()),
        h("section", { class: "plot" }, h("h2", {}, "Time of each step"), h("p", { class: "keys" }, this.stepFacts = h("span", { class: "num" })), h("div", { class: "frame" }, this.timesTop, this.times), axis())),
      h("section", {}, h("h2", {}, "KV cache"), this.cacheFacts = h("p", { class: "quiet num" }), this.blocks, this.legend),
      h("div", { class: "lower" }, h("section", { class: "requests" }, h("h2", {}, "Requests"), this.rows.element),
        h("div", {}, h("section", {}, h("h2", {}, "Latency of the last minute"), h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Latency" }, h("table", { class: "num" }, h("thead", {}, h("tr", {}, ["", "median", "90 %", "99 %", "count"].map((text) => h("th", { scope: "col" }, text || h("span", { class: "hidden-text" }, "What"))))), this.latency))), this.extra)));
    document.addEventListener("theme", () => this.draw());
    addEventListener("resize", () => this.draw());
  }

  enter() {
    this.visible = true;
    if (this.info.replay) this.loadReplay();
    else if (!this.recording) this.watch();
    this.animate();
  }

  leave() {
    this.visible = false;
    this.abort?.abort();
    this.abort = null;
  }

  say(text, bad = false) {
    this.status.textContent = text;
    this.status.classList.toggle("error", bad);
  }

  async watch() {
    if (!this.info.view) {
      this.dataset.off = "";
      this.say(`Off: ${this.info.view_refused}.`, true);
      return;
    }
    if (this.abort) return;
    const abort = this.abort = new AbortController();
    try {
      const response = await call("view/stream", { signal: abort.signal });
      this.say("Live");
      for await (const { event, data } of events(response)) {
        const sample = JSON.parse(data);
        if (event === "end") {
          this.say(sample.reason, true);
          break;
        }
        this.recorder.add(sample);
        if (!this.paused) this.take(sample);
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      this.say(error.message, true);
      this.shell.failed(error);
    }
    if (this.abort === abort) {
      this.abort = null;
      setTimeout(() => { if (this.visible && !this.recording) this.watch(); }, 2000);
    }
  }

  take(sample) {
    if (this.map.length !== sample.blocks.total) this.map = new Uint8Array(sample.blocks.total);
    applyStates(this.map, sample.blocks.first, sample.blocks.states);
    // The core's clock is not ours: a step belongs to the moment its sample came, less its age then.
    const clock = sample.stats.time;
    this.clock = clock;
    this.tookAt = performance.now();
    for (const [number, time, took, prefill, decode, drafts, rows] of sample.steps) this.steps.push({ number, time, seconds: took, parts: [prefill, decode, drafts], rows });
    this.steps = this.steps.filter((step) => step.time > clock - SPAN - 2 && step.time <= clock + 1);
    this.history.push({ time: clock, generated: sample.generated_tokens, prompt: sample.prompt_tokens });
    while (this.history.length > 2 && this.history[0].time < clock - 3) this.history.shift();
    this.sample = sample;
    if (sample.latency) this.lastLatency = sample.latency;
    this.showNumbers();
    if (!(this.nextSpoken > clock)) {
      this.nextSpoken = clock + 15;
      if (document.activeElement === this.pause) announce(`${sample.stats.num_running} requests run, ${sample.stats.num_waiting} wait.`);
    }
  }

  showNumbers() {
    const { stats, blocks, running, waiting, groups } = this.sample;
    const [old, now] = [this.history[0], this.history.at(-1)];
    const rate = (name) => (now.time > old.time ? (now[name] - old[name]) / (now.time - old.time) : 0);
    const set = (name, text) => { this.figures.get(name).textContent = text; };
    set("running", count(stats.num_running));
    set("waiting", count(stats.num_waiting));
    set("generated", count(Math.round(rate("generated"))));
    set("prompt", count(Math.round(rate("prompt"))));
    set("cache", blocks.total ? `${(100 * (1 - blocks.free / blocks.total)).toFixed(1)} %` : "–");
    set("hits", stats.prefix_cache_queries ? `${(100 * stats.prefix_cache_hits / stats.prefix_cache_queries).toFixed(0)} %` : "–");
    set("preempted", count(stats.num_preemptions));
    this.rows.show(running, waiting, stats);
    const latency = this.lastLatency ?? {};
    this.latency.replaceChildren(...LATENCIES.map(([name, label]) => h("tr", {}, h("th", { scope: "row" }, label), (latency[name] ?? [null, null, null, 0]).map((value, i) => h("td", {}, i === 3 ? count(value) : seconds(value))))));
    this.showExtra(stats);
    const sizes = groups.map(([, size]) => size);
    this.cacheFacts.textContent = `${count(blocks.total)} blocks of ${[...new Set(sizes)].join(" or ") || "?"} tokens${groups.length > 1 ? `, ${groups.length} groups` : ""}`;
    const kinds = [0, 0, 0, 0];
    const byGroup = new Map();
    for (const state of this.map) {
      const kind = kindOf(state);
      kinds[kind] += 1;
      if (kind > 1) byGroup.set(groupOf(state), (byGroup.get(groupOf(state)) ?? 0) + 1);
    }
    const words = { free: "free", cached: "free, content kept for reuse", used: "held by one request", shared: "shared by several" };
    const items = KINDS.map((kind, i) => [kind, `${count(kinds[i])} ${words[kind]}`]);
    if (groups.length > 1) for (const [i, [name, , window]] of groups.entries()) items.push([`group-${i % 6}`, `${count(byGroup.get(i) ?? 0)} held by ${groupName(name)}${window ? ` of ${count(window)}` : ""}`]);
    this.legend.replaceChildren(...items.map(([kind, text]) => h("li", { class: "num" }, h("i", { class: `dot ${kind}` }), text)));
    const last = this.steps.slice(-50);
    const mean = last.reduce((sum, step) => sum + step.seconds, 0) / (last.length || 1);
    this.stepFacts.textContent = last.length ? `${seconds(mean)} on average` : "no steps";
  }

  showExtra(stats) {
    const parts = [];
    const { drafts } = stats;
    if (drafts) {
      const number = drafts.accepted.reduce((sum, each) => sum + each, 0);
      const accepted = drafts.accepted.reduce((sum, each, i) => sum + i * each, 0);
      parts.push(["Speculation", [["drafts", count(number)], ["draft tokens", count(drafts.num_draft_tokens)], ["accepted", drafts.num_draft_tokens ? `${(100 * accepted / drafts.num_draft_tokens).toFixed(0)} %` : "–"], ["tokens a step", number ? (1 + accepted / number).toFixed(2) : "–"]]]);
    }
    if (stats.external_cache_queries) parts.push(["KV tiers", [["tokens asked for", count(stats.external_cache_queries)], ["loaded", count(stats.external_cache_hits)], ...(stats.tiers ?? []).map((tier) => [`${tier.tier}: blocks, hits`, `${count(tier.blocks)}, ${count(tier.hits)}`])]]);
    if (stats.num_deferred) parts.push(["Blocked", [["wait for a grammar, KV blocks or a fork", count(stats.num_deferred)]]]);
    this.extra.replaceChildren(...parts.map(([title, rows]) => h("section", {}, h("h2", {}, title), h("dl", { class: "pairs num" }, rows.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])))));
  }

  // Thirty frames a second while it is seen; one a second where motion is not wanted.
  animate() {
    cancelAnimationFrame(this.frame);
    let before = 0;
    const step = (now) => {
      if (!this.visible) return;
      if (now - before >= (reducedMotion.matches ? 1000 : 33)) {
        before = now;
        this.draw();
      }
      this.frame = requestAnimationFrame(step);
    };
    this.frame = requestAnimationFrame(step);
  }

  draw() {
    if (!this.visible || !this.sample) return;
    const since = this.paused || this.recording ? 0 : Math.min(SPAN, (performance.now() - this.tookAt) / 1e3);
    const now = this.clock + since - 0.15; // a little late, so that bars come in at the edge and not beside it
    this.tokensTop.textContent = count(drawTokens(this.tokens, this.steps, now, SPAN));
    this.timesTop.textContent = seconds(drawTimes(this.times, this.steps, now, SPAN));
    if (this.drawnSample !== this.sample || this.drawnWidth !== this.blocks.clientWidth || this.drawnTheme !== document.documentElement.dataset.theme) {
      this.drawnSample = this.sample;
      this.drawnWidth = this.blocks.clientWidth;
      this.drawnTheme = document.documentElement.dataset.theme;
      drawBlocks(this.blocks, this.map, this.sample.groups.length > 1);
    }
  }

  togglePause() {
    this.paused = !this.paused;
    this.pause.textContent = this.paused ? "Go on" : "Pause";
    if (this.recording && !this.paused) this.advance();
    this.say(this.paused ? "Paused" : this.recording ? "A recording" : "Live");
  }

  async saveRecording() {
    if (!this.recorder.samples.length) return;
    const name = `quire-view-${new Date().toISOString().slice(0, 19).replaceAll(":", "")}.json.gz`;
    download(name, await this.recorder.save(this.info));
  }

  async loadReplay() {
    if (this.recording) return;
    try {
      await this.play(await (await call("view/recording")).blob());
    } catch (error) {
      this.say(error.message, true);
    }
  }

  async play(blob) {
    let recording;
    try {
      recording = await readRecording(blob);
    } catch (error) {
      this.say(error.message, true);
      return;
    }
    this.leave();
    this.visible = true;
    this.recording = recording;
    this.save.disabled = true;
    this.player.hidden = false;
    this.position.max = String(recording.samples.length - 1);
    this.seek(0);
    this.say("A recording");
    this.animate();
    this.advance();
  }

  seek(index) {
    this.map = this.recording.map.slice();
    this.steps = [];
    this.history = [];
    this.nextSpoken = Infinity;
    const { samples } = this.recording;
    for (const { blocks } of samples.slice(0, Math.max(0, index - 320))) applyStates(this.map, blocks.first, blocks.states);
    for (const sample of samples.slice(Math.max(0, index - 320), index + 1)) this.take(sample);
    this.at = index;
    this.draw();
  }

  advance() {
    clearTimeout(this.playing);
    if (this.paused || !this.recording || !this.visible) return;
    const { samples } = this.recording;
    const next = this.at + 1 < samples.length ? this.at + 1 : 0;
    const wait = next ? Math.min(1, Math.max(0.01, samples[next].time - samples[this.at].time)) : 2;
    this.playing = setTimeout(() => {
      if (next) {
        this.at = next;
        this.take(samples[next]);
      } else {
        this.seek(0);
      }
      this.position.value = String(this.at);
      this.advance();
    }, 1e3 * wait);
  }
}

const axis = () => h("p", { class: "axis", "aria-hidden": "true" }, h("span", {}, `${SPAN} s ago`), h("span", {}, "now"));
const groupName = (name) => name.replace(/Group$/, "").replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase();

customElements.define("q-view", View);
