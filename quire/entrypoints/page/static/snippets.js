// A request as commands to copy.

import { url } from "./api.js";

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

export function curl(path, body, hasKey) {
  const key = hasKey ? " \\\n  -H \"Authorization: Bearer $QUIRE_API_KEY\"" : "";
  return `curl ${quote(url(path))} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d ${quote(JSON.stringify(body, null, 2))}\n`;
}

const OPENAI = new Set(["model", "messages", "prompt", "temperature", "top_p", "n", "stop", "max_tokens", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "stream", "stream_options", "echo"]);

export function python(path, body, hasKey) {
  const own = Object.entries(body).filter(([name]) => OPENAI.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI.has(name)));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value, "    ")},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, "    ")},`);
  const what = path.includes("chat") ? "chat.completions" : "completions";
  const result = path.includes("chat") ? "message.content" : "text";
  return `${hasKey ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(url("v1"))}, api_key=${hasKey ? 'os.environ["QUIRE_API_KEY"]' : '"none"'})\nresponse = client.${what}.create(\n${lines.join("\n")}\n)\nprint(response.choices[0].${result})\n`;
}

function literal(value, indent) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = indent + "    ";
  const isList = Array.isArray(value);
  const parts = isList ? value.map((each) => inner + literal(each, inner)) : Object.entries(value).map(([name, each]) => `${inner}${JSON.stringify(name)}: ${literal(each, inner)}`);
  if (!parts.length) return isList ? "[]" : "{}";
  return `${isList ? "[" : "{"}\n${parts.join(",\n")},\n${indent}${isList ? "]" : "}"}`;
}
