// A little colour for code: comments, strings, numbers and the words that most languages share.

import { h } from "./dom.js";

const WORDS = new Set(("abstract and as assert async await begin bool boolean break case catch char class const continue def default defer del delete do double elif else end enum except export extends false final finally float fn for foreach from func function global go if impl implements import in include instanceof int interface is lambda let long loop match mod module mut namespace new nil none nonlocal not null or package pass private protected pub public raise record return self short signed sizeof static string struct super switch template then this throw trait true try type typedef typeof union unless unsafe unsigned until use using val var virtual void volatile when where while with yield " +
  "select insert update create table into values join left right inner outer group order by having limit on set").split(" "));
const HASH = new Set(["python", "py", "sh", "bash", "shell", "ruby", "rb", "yaml", "yml", "toml", "perl", "r", "makefile", "dockerfile", "elixir"]);
const DASH = new Set(["sql", "lua", "haskell", "ada"]);
const MAX = 20_000; // characters; longer ones stay plain

export function highlight(text, language = "") {
  if (text.length > MAX || ["text", "txt", "plaintext"].includes(language)) return [text];
  const name = language.toLowerCase();
  const comment = HASH.has(name) ? "#[^\\n]*" : DASH.has(name) ? "--[^\\n]*" : "\\/\\/[^\\n]*|\\/\\*[\\s\\S]*?\\*\\/|<!--[\\s\\S]*?-->";
  const pattern = new RegExp(`(${comment})|("""[\\s\\S]*?"""|"(?:\\\\.|[^"\\\\\\n])*"|'(?:\\\\.|[^'\\\\\\n])*'|\`(?:\\\\.|[^\`\\\\])*\`)|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)`, "g");
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(pattern)) {
    const [all, isComment, isString, isNumber, word] = found;
    const kind = isComment ? "c" : isString ? "s" : isNumber ? "n" : WORDS.has(name === "sql" ? word.toLowerCase() : word) || ["None", "True", "False"].includes(word) ? "k" : null;
    if (!kind) continue;
    if (found.index > at) parts.push(text.slice(at, found.index));
    parts.push(h("span", { class: `hl-${kind}` }, all));
    at = found.index + all.length;
  }
  parts.push(text.slice(at));
  return parts;
}
