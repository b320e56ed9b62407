// Calls of the server. The key stays in this tab.

const KEY = "quire.key";

// The server's messages begin and end as a log's do.
const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}`.replace(/[^.!?…]$/, "$&.");

export class ApiFailure extends Error {
  constructor(message, status = 0) {
    super(sentence(message));
    this.status = status;
  }
}

export const key = () => sessionStorage.getItem(KEY) ?? "";
export const setKey = (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY));
export const url = (path) => new URL(path.replace(/^\//, ""), document.baseURI).href;

let onUnauthorized = () => {};
export const whenUnauthorized = (handler) => { onUnauthorized = handler; };

export async function call(path, { body, signal } = {}) {
  const headers = key() ? { Authorization: `Bearer ${key()}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(url(path), { method: body === undefined ? "GET" : "POST", headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch { /* not JSON: the status must do */ }
  const failure = new ApiFailure(String(message), response.status);
  if (response.status === 401) onUnauthorized(failure.message);
  throw failure;
}

export const get = async (path) => (await call(path)).json();

// Events of a server-sent stream: {event, data}. A stream that ends in the middle is a failure.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let done, value;
      try {
        ({ done, value } = await reader.read());
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiFailure("The connection broke in the middle of the answer. The server may have stopped.");
      }
      if (done) return;
      rest += value;
      const parts = rest.split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        let event = "message";
        const data = [];
        for (const line of part.split("\n")) {
          if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
          else if (line.startsWith("event:")) event = line.slice(6).trim();
        }
        if (data.length) yield { event, data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Chunks of a completion or chat completion, as objects; throws what the server reports in the stream.
export async function* chunks(path, body, signal) {
  const response = await call(path, { body: { ...body, stream: true, stream_options: { include_usage: true } }, signal });
  let ended = false;
  for await (const { data } of events(response)) {
    if (data === "[DONE]") {
      ended = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiFailure(chunk.error.message ?? "The server failed.");
    yield chunk;
  }
  if (!ended) throw new ApiFailure("The answer ended too early. The server may have stopped.");
}
