// Markdown of answers: parsed, sanitized, and rendered block by block, so that a long answer costs what its last block does.

import { marked } from "./vendor/marked.js";
import "./vendor/purify.js";
import { copy, h } from "./dom.js";
import { highlight } from "./highlight.js";

const escape = (text) => text.replace(/[&<>"']/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[c]);

const math = (name, level, pattern, start, display) => ({
  name, level,
  start: (src) => { const at = src.search(start); return at < 0 ? undefined : at; },
  tokenizer(src) {
    const found = pattern.exec(src);
    return found ? { type: name, raw: found[0], text: (found[1] ?? found[2]).trim() } : undefined;
  },
  renderer: (token) => `<span class="math" data-tex="${escape(token.text)}" data-display="${display}"></span>`,
});

marked.use({
  gfm: true,
  breaks: false,
  renderer: {
    html: ({ text }) => escape(text), // shown, never part of the page
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`, // loading it would tell somebody
  },
  extensions: [
    math("blockMath", "block", /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n|$)/, /\$\$|\\\[/, true),
    math("displayMath", "inline", /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])/, /\$\$|\\\[/, true),
    math("inlineMath", "inline", /^(?:\$(?![\s\d])((?:\\.|[^\\$\n])+?)(?<!\s)\$(?!\d)|\\\(([\s\S]+?)\\\))/, /\$|\\\(/, false),
  ],
});

const TEXT = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input", "li", "ol", "p", "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["align", "checked", "class", "data-display", "data-tex", "disabled", "href", "start", "type"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const FORMULA = { USE_PROFILES: { mathMl: true }, FORBID_ATTR: ["href", "style"], ALLOW_DATA_ATTR: false, RETURN_DOM_FRAGMENT: true };

let temml = null; // loaded with the first formula

async function renderFormulas(root) {
  const formulas = [...root.querySelectorAll("span.math:not(.done)")];
  if (!formulas.length) return;
  for (const span of formulas) if (!span.firstChild) span.textContent = span.dataset.tex;
  temml ??= (await import("./vendor/temml.js")).default;
  for (const span of formulas) {
    span.classList.add("done");
    try {
      const text = temml.renderToString(span.dataset.tex, { displayMode: span.dataset.display === "true", throwOnError: true, maxSize: [30, 30], maxExpand: 500 });
      span.replaceChildren(DOMPurify.sanitize(text.replace(/ style="[^"]*"/g, ""), FORMULA)); // the policy forbids them
      span.classList.toggle("display", span.dataset.display === "true");
    } catch {
      span.classList.add("mono"); // what the model wrote, if that is no formula
    }
  }
}

function finish(fragment) {
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const box of fragment.querySelectorAll("input")) {
    if (box.type !== "checkbox") box.remove();
    else box.disabled = true;
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const code of fragment.querySelectorAll("pre > code")) {
    const language = /language-([\w+#.-]{1,24})/.exec(code.className)?.[1] ?? "";
    const text = code.textContent;
    const button = h("button", { class: "plain", type: "button", onclick: () => copy(text, button) }, "Copy");
    const body = h("pre", { tabindex: "0", role: "region", "aria-label": language ? `Code, ${language}` : "Code" }, highlight(text, language));
    code.parentElement.replaceWith(h("figure", { class: "code" }, h("figcaption", {}, h("span", {}, language || "text"), button), body));
  }
  return fragment;
}

// What the parser cannot take, such as thousands of quotations in one another, is shown as it is.
function parse(text) {
  try {
    return finish(DOMPurify.sanitize(marked.parse(text), TEXT));
  } catch {
    const fragment = document.createDocumentFragment();
    fragment.append(h("p", { class: "as-it-is" }, text));
    return fragment;
  }
}

// The blocks of a text that nothing after it can change: all but the last, and but a list before that, whose next item
// begins like a paragraph.
function settledPart(text) {
  let blocks;
  try {
    blocks = marked.lexer(text).filter((token) => token.raw);
  } catch {
    return "";
  }
  const isBlock = (token) => token.type !== "space";
  let last = blocks.findLastIndex(isBlock);
  const before = blocks.slice(0, Math.max(0, last)).findLastIndex(isBlock);
  if (before >= 0 && (blocks[before].type === "list" || blocks[before].codeBlockStyle === "indented")) last = before;
  const settled = blocks.slice(0, Math.max(0, last)).map((token) => token.raw).join("");
  return text.startsWith(settled) ? settled : ""; // the parser replaces tabs, say
}

// One answer's text. `update` with the whole text so far; only what changed is parsed and rendered.
export class Markdown {
  constructor(root) {
    this.root = root;
    this.reset();
  }

  reset() {
    this.settled = ""; // rendered for good
    this.tail = [];
    this.root.replaceChildren();
  }

  update(text, done = false) {
    text = text.replace(/\r\n?/g, "\n");
    if (!text.startsWith(this.settled)) this.reset();
    const rest = text.slice(this.settled.length);
    for (const node of this.tail) node.remove();
    this.tail = [];
    let open = "";
    if (done) {
      this.root.append(parse(rest));
      this.settled = text;
    } else {
      const before = settledPart(rest);
      open = rest.slice(before.length);
      if (before) this.root.append(parse(before));
      this.settled += before;
    }
    if (open) {
      const fragment = parse(open);
      this.tail = [...fragment.childNodes];
      this.root.append(fragment);
    }
    renderFormulas(this.root);
  }
}
