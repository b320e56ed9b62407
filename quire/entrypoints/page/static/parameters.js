// Sampling parameters: names, defaults and ranges are those of docs/sampling.md. What is left empty is not sent.

import { h } from "./dom.js";

const number = (name, label, min, max, step, fallback, help, more = {}) => ({ name, label, kind: "number", min, max, step, fallback, help, ...more });
const flag = (name, label, fallback, help) => ({ name, label, kind: "flag", fallback, help });
const list = (name, label, kind, range, help) => ({ name, label, kind, range, fallback: "none", help });

export const GROUPS = [
  ["Sampling", [
    number("temperature", "Temperature", 0, 10_000, 0.05, 1, "0 is greedy", { slider: 2 }),
    number("top_p", "Top p", 0.001, 1, 0.01, 1, "Keep the likeliest tokens whose probabilities add up to this", { slider: 1 }),
    number("top_k", "Top k", -1, 2 ** 31, 1, 0, "Keep the k likeliest tokens; 0 and −1: all"),
    number("min_p", "Min p", 0, 1, 0.01, 0, "Drop tokens less likely than this fraction of the likeliest's probability", { slider: 1 }),
    number("seed", "Seed", -(2 ** 53), 2 ** 53, 1, "none", "Makes an answer repeatable"),
  ]],
  ["Length", [
    number("max_tokens", "Max tokens", 1, 2 ** 31, 1, "model's limit", "The most tokens of an answer"),
    number("min_tokens", "Min tokens", 0, 2 ** 31, 1, 0, "No end before this many tokens"),
    number("thinking_token_budget", "Thinking budget", -1, 2 ** 31, 1, "none", "Reasoning tokens after which the end tag is forced; −1: no limit"),
    number("truncate_prompt_tokens", "Truncate prompt", -1, 2 ** 31, 1, "none", "Keep only the last tokens of the prompt; −1: as many as fit"),
  ]],
  ["Penalties", [
    number("repetition_penalty", "Repetition", 0.01, 100, 0.01, 1, "Divides positive and multiplies negative logits of tokens in prompt and output", { slider: 2 }),
    number("presence_penalty", "Presence", -2, 2, 0.05, 0, "Subtracted from the logits of tokens in the output", { slider: 2 }),
    number("frequency_penalty", "Frequency", -2, 2, 0.05, 0, "The same, times the number of occurrences", { slider: 2 }),
    list("bad_words", "Bad words", "lines", "256 of 1,024 characters", "One per line: texts that may not be generated"),
    list("logit_bias", "Logit bias", "json", "−100 to 100, 1,024 tokens", "{\"token id\": bias}, added to logits"),
    list("allowed_token_ids", "Allowed tokens", "ids", "at least one", "Only these token ids may be sampled"),
    list("repetition_detection", "Repetition detection", "json", "", "{\"max_pattern_size\": 8, \"min_count\": 4} ends an answer that repeats itself"),
  ]],
  ["Stop", [
    list("stop", "Stop strings", "lines", "64 of 1,024 characters", "One per line; \\n stands for a new line"),
    list("stop_token_ids", "Stop tokens", "ids", "256", "Token ids that end the answer"),
    flag("include_stop_str_in_output", "Keep the stop string", false, "The stop string stays in the text"),
    flag("ignore_eos", "Ignore end of text", false, "Continue past the model's end-of-text token"),
  ]],
  ["Output", [
    number("logprobs", "Alternatives", 0, 20, 1, "none", "Colour tokens by their probability, and show this many alternatives"),
    list("logprob_token_ids", "Score tokens", "ids", "128", "Logprobs of these token ids in place of the likeliest"),
    number("prompt_logprobs", "Prompt logprobs", 0, 20, 1, "none", "The same for the prompt's tokens (of raw completions)"),
    number("n", "Choices", 1, 128, 1, 1, "Answers to the same prompt (of raw completions)"),
    number("stream_interval", "Stream interval", 1, 2 ** 31, 1, 1, "Tokens in each event of the stream"),
    flag("skip_special_tokens", "Skip special tokens", true, "Leave special tokens out of the text"),
    flag("spaces_between_special_tokens", "Spaces between special tokens", true, "Accepted; has no effect"),
    number("priority", "Priority", -(2 ** 31), 2 ** 31, 1, 0, "Lower runs earlier, on servers with --scheduling-policy priority"),
    list("vllm_xargs", "Extra arguments", "json", "", "For logits processors of the server's own"),
  ]],
];
export const ALL = GROUPS.flatMap(([, parameters]) => parameters);

// What a field's text means; throws with what is allowed.
export function read(parameter, text) {
  if (parameter.kind === "flag") return text;
  if (parameter.kind === "number") {
    const value = Number(text);
    if (!Number.isFinite(value) || value < parameter.min || value > parameter.max) throw new Error(`${parameter.label} must be ${range(parameter)}.`);
    if (parameter.step >= 1 && !Number.isInteger(value)) throw new Error(`${parameter.label} must be a whole number.`);
    return value;
  }
  if (parameter.kind === "lines") return text.split("\n").filter((line) => line).map((line) => line.replaceAll("\\n", "\n"));
  if (parameter.kind === "ids") {
    const ids = text.split(/[\s,]+/).filter((word) => word).map(Number);
    if (ids.some((id) => !Number.isInteger(id) || id < 0)) throw new Error(`${parameter.label} must be token ids, with commas between.`);
    return ids;
  }
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${parameter.label}: ${error.message}`);
  }
}

export function range(parameter) {
  if (parameter.kind !== "number") return parameter.range ?? "";
  const show = (value) => (Math.abs(value) >= 2 ** 31 ? null : value.toLocaleString("en").replace("-", "−"));
  const [low, high] = [show(parameter.min), show(parameter.max)];
  if (low !== null && high !== null) return `${low} to ${high}`;
  return low !== null ? `${low} and more` : "any";
}

// The fields of a body, from texts by name.
export function toBody(values) {
  const body = {};
  for (const parameter of ALL) {
    const text = values[parameter.name];
    if (text === undefined || text === "" || text === null) continue;
    body[parameter.name] = read(parameter, text);
  }
  return body;
}

class Parameters extends HTMLElement {
  // values: texts by name; ids begin with `own`; changed(values)
  show(values, info, own, changed) {
    this.own = own;
    this.values = { ...values };
    const rows = GROUPS.map(([title, parameters]) => {
      const set = parameters.filter((each) => this.values[each.name] !== undefined && this.values[each.name] !== "").length;
      return h("details", { class: "group", open: title === "Sampling" || set > 0 }, h("summary", {}, title), parameters.map((each) => this.field(each, info, changed)));
    });
    this.replaceChildren(...rows);
  }

  field(parameter, info, changed) {
    const id = `${this.own}p-${parameter.name}`;
    const set = (value) => {
      if (value === "" || value === undefined) delete this.values[parameter.name];
      else this.values[parameter.name] = value;
      let problem = "";
      if (value !== "" && value !== undefined) {
        try {
          read(parameter, value);
        } catch (error) {
          problem = error.message;
        }
      }
      note.textContent = problem;
      input.setAttribute("aria-invalid", problem ? "true" : "false");
      changed({ ...this.values });
    };
    const note = h("p", { class: "error", id: `${id}-note`, role: "status" });
    const help = h("p", { class: "help", id: `${id}-help` }, parameter.help, range(parameter) && h("span", {}, ` · ${range(parameter)}`), h("span", {}, ` · default ${fallback(parameter, info)}`));
    const value = this.values[parameter.name];
    let input, more = null;
    if (parameter.kind === "flag") {
      input = h("input", { type: "checkbox", id, checked: value ?? parameter.fallback, "aria-describedby": help.id, onchange: () => set(input.checked === parameter.fallback ? undefined : input.checked) });
      return h("div", { class: "field flag" }, input, h("label", { for: id }, parameter.label), help, note);
    }
    const common = { id, "aria-describedby": `${help.id} ${note.id}`, spellcheck: "false", autocomplete: "off" };
    if (parameter.kind === "number") {
      input = h("input", { ...common, type: "text", inputmode: "decimal", class: "num", value: value ?? "", placeholder: String(fallback(parameter, info)), oninput: () => { set(input.value.trim()); if (more) more.value = input.value || parameter.fallback; } });
      if (parameter.slider) {
        more = h("input", { type: "range", min: String(Math.max(parameter.min, -parameter.slider)), max: String(parameter.slider), step: String(parameter.step), value: String(value ?? parameter.fallback), "aria-label": `${parameter.label}, slider`, oninput: () => { input.value = more.value; set(more.value); } });
      }
    } else {
      input = h("textarea", { ...common, rows: "2", class: "code", value: value ?? "", placeholder: "none", oninput: () => set(input.value) });
    }
    return h("div", { class: `field ${parameter.kind}` }, h("label", { for: id }, parameter.label), more, input, help, note);
  }
}

function fallback(parameter, info) {
  if (parameter.kind === "flag") return parameter.fallback ? "on" : "off";
  if (parameter.name === "max_tokens" && info) return `up to ${info.max_model_len.toLocaleString("en")}`;
  return parameter.fallback;
}

customElements.define("q-parameters", Parameters);
