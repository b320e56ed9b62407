// Chats, kept in this browser alone. A chat is a tree: an edit or another answer is a branch, and nothing is lost.

const CHATS = "quire.chats";
const ACTIVE = "quire.active";

const EMPTY = { title: "", model: "", system: "", params: {}, tools: "", schema: "", chosen: {}, draft: "" };

const id = () => crypto.randomUUID?.() ?? Math.random().toString(36).slice(2);

export class Chats {
  constructor() {
    this.chats = [];
    try {
      this.chats = JSON.parse(localStorage.getItem(CHATS) ?? "[]").filter((chat) => chat?.id && chat.nodes && typeof chat.nodes === "object").map((chat) => ({ ...EMPTY, ...chat }));
    } catch { /* not ours, or from another version: begin anew */ }
    this.full = false;
    if (!this.chats.length) this.add();
    this.active = this.chats.find((chat) => chat.id === localStorage.getItem(ACTIVE)) ?? this.chats[0];
  }

  add() {
    const before = this.active;
    const chat = { ...EMPTY, id: id(), model: before?.model ?? "", params: { ...(before?.params ?? {}) }, nodes: {}, chosen: {} };
    this.chats.unshift(chat);
    this.active = chat;
    return chat;
  }

  remove(chat) {
    this.chats = this.chats.filter((other) => other !== chat);
    if (!this.chats.length) this.add();
    if (this.active === chat) this.active = this.chats[0];
    this.save();
  }

  save() {
    const slim = (name, value) => (name === "tokens" && Array.isArray(value) ? undefined : value); // of logprobs: megabytes
    try {
      localStorage.setItem(CHATS, JSON.stringify(this.chats, slim));
      localStorage.setItem(ACTIVE, this.active.id);
      this.full = false;
    } catch {
      this.full = true;
    }
  }
}

export const children = (chat, parent) => Object.values(chat.nodes).filter((node) => node.parent === parent);

export function addNode(chat, parent, fields) {
  const node = { id: id(), parent, content: "", ...fields };
  chat.nodes[node.id] = node;
  chat.chosen[parent] = node.id;
  return node;
}

// The messages that are shown: from the root along the chosen branches.
export function path(chat) {
  const found = [];
  for (let parent = "root"; ; parent = found.at(-1).id) {
    const next = chat.nodes[chat.chosen[parent]] ?? children(chat, parent).at(-1);
    if (!next || found.includes(next)) return found;
    found.push(next);
  }
}

// Up to and with `node`, as the API takes them.
export function messages(chat, upTo) {
  const shown = [];
  for (let node = upTo; node; node = chat.nodes[node.parent]) shown.unshift(node);
  const sent = shown.map((node) => {
    if (node.role === "tool") return { role: "tool", tool_call_id: node.tool_call_id, content: node.content };
    const message = { role: node.role, content: node.content };
    if (node.tool_calls?.length) message.tool_calls = node.tool_calls;
    return message;
  });
  return chat.system.trim() ? [{ role: "system", content: chat.system }, ...sent] : sent;
}
