// Tokens with their probabilities: a colour each, the alternatives in a card, and a way on from any of them.

import { h } from "./dom.js";

const STEPS = [0.9, 0.6, 0.3, 0.1]; // probabilities at which the colour changes
const level = (logprob) => { const p = Math.exp(logprob); const at = STEPS.findIndex((bound) => p >= bound); return at < 0 ? STEPS.length : at; };
const percent = (logprob) => { const p = 100 * Math.exp(logprob); return p >= 99.95 ? "100 %" : p >= 10 ? `${p.toFixed(0)} %` : p >= 0.1 ? `${p.toFixed(1)} %` : "< 0.1 %"; };

export const shown = (text) => text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥");
export const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";

// tokens: [{text, logprob, top: [{text, logprob}]}]; continueFrom(index, text) or null.
class Tokens extends HTMLElement {
  show(tokens, { continueFrom = null, boundaries = false } = {}) {
    this.classList.toggle("boundaries", boundaries);
    this.continueFrom = continueFrom;
    this.all = tokens;
    if (this.shownTokens && tokens.length >= this.shownTokens.length && tokens[0] === this.shownTokens[0]) {
      this.line.append(...tokens.slice(this.shownTokens.length).map((token, i) => this.token(token, this.shownTokens.length + i)));
    } else {
      this.card = h("div", { class: "card", hidden: true });
      this.line = h("div", { class: "line", role: "group", "aria-label": "Tokens; arrow keys move, Enter shows alternatives" }, tokens.map((token, i) => this.token(token, i)));
      this.line.addEventListener("mouseover", (event) => { if (event.target.dataset?.i !== undefined) this.open(event.target); });
      this.line.addEventListener("click", (event) => { if (event.target.dataset?.i !== undefined) this.open(event.target, true); });
      this.line.addEventListener("keydown", (event) => this.key(event));
      this.onmouseleave = () => { if (!this.card.contains(document.activeElement)) this.close(); };
      this.replaceChildren(this.line, this.card);
      const first = this.line.querySelector("button");
      if (first) first.tabIndex = 0;
    }
    this.shownTokens = [...tokens];
  }

  token(token, i) {
    const known = token.logprob !== null && token.logprob !== undefined;
    const label = known ? `${visible(token.text)}, ${percent(token.logprob)}` : visible(token.text);
    return h("button", { type: "button", class: `token p${known ? level(token.logprob) : "x"}`, "data-i": String(i), tabindex: i === 0 ? "0" : "-1", "aria-label": label }, shown(token.text));
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") return this.close();
    if (!step || event.target.dataset?.i === undefined) return undefined;
    event.preventDefault();
    const next = this.line.children[Number(event.target.dataset.i) + step];
    if (!next) return undefined;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
    return this.open(next);
  }

  open(button, focus = false) {
    const i = Number(button.dataset.i);
    const token = this.all[i];
    if (!token || token.logprob === null || token.logprob === undefined) return;
    this.line.querySelector("[aria-current]")?.removeAttribute("aria-current");
    button.setAttribute("aria-current", "true");
    const top = token.top?.length ? token.top : [{ text: token.text, logprob: token.logprob }];
    const rows = top.map((each) => {
      const bar = h("span", { class: "bar" });
      bar.style.setProperty("--part", String(Math.exp(each.logprob)));
      const inside = [h("span", { class: "mono" }, visible(each.text)), bar, h("span", { class: "num" }, percent(each.logprob))];
      const own = each.text === token.text;
      return this.continueFrom
        ? h("button", { type: "button", class: own ? "own" : "", title: "Continue from this token", onclick: () => this.continueFrom(i, each.text) }, inside)
        : h("div", { class: own ? "own" : "" }, inside);
    });
    const note = this.continueFrom ? h("p", { class: "quiet" }, "Choose one to continue from there.") : null;
    this.card.replaceChildren(h("p", { class: "quiet num" }, `token ${i + 1} · ${token.logprob.toFixed(3)}`), ...rows, note ?? "");
    this.card.hidden = false;
    const frame = this.getBoundingClientRect();
    const at = button.getClientRects()[0] ?? button.getBoundingClientRect();
    this.card.style.left = `${Math.max(0, Math.min(at.left - frame.left, frame.width - this.card.offsetWidth))}px`;
    this.card.style.top = `${at.bottom - frame.top + 4}px`;
    if (focus) this.card.querySelector("button")?.focus();
  }

  close() {
    this.card.hidden = true;
    this.line.querySelector("[aria-current]")?.removeAttribute("aria-current");
  }
}

customElements.define("q-tokens", Tokens);

export const legend = () => h("p", { class: "legend", "aria-label": "Colours: probability of each token" },
  ["≥ 90 %", "60 – 90", "30 – 60", "10 – 30", "< 10 %"].map((text, i) => h("span", {}, h("i", { class: `swatch p${i}` }), text)));

// Of a chat's chunk, and of a completion's.
const ofChat = (each) => ({ text: each.token, logprob: each.logprob, bytes: each.bytes });
export const chatTokens = (logprobs) => (logprobs?.content ?? []).map((each) => ({ ...ofChat(each), top: (each.top_logprobs ?? []).map(ofChat) }));
export const completionTokens = (logprobs) => (logprobs?.tokens ?? []).map((text, i) => ({
  text, logprob: logprobs.token_logprobs[i],
  top: Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([other, logprob]) => ({ text: other, logprob })).sort((a, b) => b.logprob - a.logprob),
}));

// The text of tokens, of which one may end within a character.
export const joined = (tokens) => (tokens.every((token) => token.bytes) ? new TextDecoder().decode(new Uint8Array(tokens.flatMap((token) => token.bytes))) : tokens.map((token) => token.text).join(""));
