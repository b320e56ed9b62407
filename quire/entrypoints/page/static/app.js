// The shell: what the server says of itself, the tabs, the theme, the key.

import { call, get, key, setKey, whenUnauthorized } from "./api.js";
import { h, icon } from "./dom.js";
import "./chat.js";
import "./complete.js";
import "./view.js";

const THEME = "quire.theme";
const TABS = [["chat", "Chat", "q-chat"], ["complete", "Complete", "q-complete"], ["engine", "Engine", "q-view"]];

class App extends HTMLElement {
  async connectedCallback() {
    this.showTheme(localStorage.getItem(THEME) ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
    this.main = h("main", { id: "main", tabindex: "-1" });
    this.banner = h("div", { class: "banner", role: "alert", hidden: true });
    this.replaceChildren(this.header(), this.banner, this.main, h("p", { id: "announcer", class: "hidden-text", role: "status", "aria-live": "polite" }));
    whenUnauthorized((message) => this.askKey(message));
    await this.connect();
  }

  header() {
    this.tabs = TABS.map(([name, label]) => h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "main", "aria-selected": "false", tabindex: "-1", onclick: () => { location.hash = name; } }, label));
    const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Parts of the page" }, this.tabs);
    tabs.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = this.tabs[(this.tabs.indexOf(document.activeElement) + step + this.tabs.length) % this.tabs.length];
      next.focus();
      next.click();
    });
    this.themeButton = h("button", { class: "icon", type: "button", onclick: () => { const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark"; localStorage.setItem(THEME, next); this.showTheme(next); } });
    this.keyButton = h("button", { class: "icon", type: "button", "aria-label": "API key", title: "API key", hidden: true, onclick: () => this.askKey("") }, icon("key"));
    this.listButton = h("button", { class: "icon list-button", type: "button", "aria-label": "Chats", "aria-expanded": "false", onclick: () => this.toggle("chats") }, icon("list"));
    this.panelButton = h("button", { class: "icon", type: "button", "aria-label": "Settings", title: "Settings", "aria-expanded": "true", onclick: () => this.toggle("panel") }, icon("sliders"));
    this.modelPlace = h("span", { class: "model" });
    this.showTheme(document.documentElement.dataset.theme);
    return h("header", {}, this.listButton, h("a", { class: "brand", href: "#chat", "aria-label": "Quire" }, h("img", { src: "page/icon.svg", alt: "" }), h("span", {}, "Quire")), tabs, h("div", { class: "tools" }, this.modelPlace, this.keyButton, this.themeButton, this.panelButton));
  }

  showTheme(theme) {
    document.documentElement.dataset.theme = theme;
    if (!this.themeButton) return;
    const other = theme === "dark" ? "light" : "dark";
    this.themeButton.replaceChildren(icon(other === "dark" ? "moon" : "sun"));
    this.themeButton.setAttribute("aria-label", `Use the ${other} theme`);
    this.themeButton.title = `Use the ${other} theme`;
    document.dispatchEvent(new CustomEvent("theme"));
  }

  async connect() {
    try {
      this.info = await get("view/info");
    } catch (error) {
      if (error.status === 401) return;
      this.say("The server cannot be reached.", error.message);
      setTimeout(() => this.connect(), 2000);
      return;
    }
    this.banner.hidden = true;
    if (this.info.open_to_network) this.say("This server is open to the network and has no API keys.", "Whoever reaches it can use it. Set a key with --api-key. The live view is off.");
    this.showModels();
    this.panes = {};
    this.engineOnly = Boolean(this.info.replay || this.info.pools); // nothing generates text
    if (this.engineOnly) location.hash = "engine";
    addEventListener("hashchange", () => this.route());
    this.dataset.panel = innerWidth >= 1100 ? "open" : "";
    this.showPanels();
    this.route();
    document.dispatchEvent(new CustomEvent("ready"));
  }

  say(title, text) {
    this.banner.replaceChildren(h("strong", {}, title), ` ${text}`);
    this.banner.hidden = false;
  }

  showModels() {
    const names = this.info.models;
    this.chosen = names.includes(this.chosen) ? this.chosen : names[0];
    if (names.length < 2) {
      this.modelPlace.replaceChildren(names[0] ?? "");
      this.modelPlace.title = names[0] ?? "";
      return;
    }
    const select = h("select", { "aria-label": "Model", onchange: () => { this.chosen = select.value; } }, names.map((name) => h("option", { value: name, selected: name === this.chosen }, name)));
    this.modelPlace.replaceChildren(select);
  }

  route() {
    const wanted = location.hash.slice(1);
    const [name, label, tag] = TABS.find(([each]) => each === wanted) ?? (this.engineOnly ? TABS[2] : TABS[0]);
    this.tabs.forEach((tab) => {
      const here = tab.id === `tab-${name}`;
      tab.setAttribute("aria-selected", String(here));
      tab.tabIndex = here ? 0 : -1;
      tab.hidden = this.engineOnly && tab.id !== "tab-engine";
    });
    document.title = `Quire · ${label}`;
    this.dataset.tab = name;
    this.panelButton.hidden = name === "engine";
    this.keyButton.hidden = !this.info.keys;
    this.listButton.hidden = name !== "chat";
    for (const [other, pane] of Object.entries(this.panes)) if (other !== name) { pane.hidden = true; pane.leave?.(); }
    if (!this.panes[name]) {
      const pane = this.panes[name] = h(tag);
      this.main.append(pane);
      pane.start(this.info, { model: () => this.chosen, close: () => this.close(), failed: (error) => this.failed(error) });
    }
    this.panes[name].hidden = false;
    this.panes[name].enter?.();
    this.main.setAttribute("aria-labelledby", `tab-${name}`);
    this.close();
  }

  // After a call that failed: is it the server? One that is about to end still answers for a moment.
  async failed(error, checks = 3) {
    if (error.status && error.status !== 503) return;
    try {
      await call("health");
      this.banner.hidden = !this.info.open_to_network;
      if (checks) setTimeout(() => this.failed(error, checks - 1), 1000);
    } catch (again) {
      if (again.status === 401) return;
      this.say("The engine does not answer.", "Your chats are kept in this browser. Start the server again and go on.");
      setTimeout(() => this.failed(error, 0), 2000);
    }
  }

  toggle(name) {
    this.dataset[name] = this.dataset[name] === "open" ? "" : "open";
    this.showPanels();
  }

  close() {
    if (innerWidth < 1100) {
      this.dataset.chats = "";
      this.dataset.panel = "";
    }
    this.showPanels();
  }

  showPanels() {
    this.panelButton.setAttribute("aria-expanded", String(this.dataset.panel === "open"));
    this.listButton.setAttribute("aria-expanded", String(this.dataset.chats === "open"));
  }

  askKey(message) {
    this.keyButton.hidden = false;
    if (this.dialog) {
      this.dialog.querySelector(".error").textContent = message && key() ? message : "";
      return;
    }
    const field = h("input", { type: "password", id: "key", autocomplete: "off", value: key() });
    const wrong = h("p", { class: "error", role: "alert" }, message && key() ? message : "");
    this.dialog = h("dialog", { "aria-labelledby": "key-title" }, h("h2", { id: "key-title" }, "API key"), h("p", { class: "quiet" }, "This server asks for one. It is kept until you close this tab, and sent to this server alone."),
      h("form", { onsubmit: async (event) => { event.preventDefault(); setKey(field.value.trim()); await this.tryKey(wrong); } }, h("label", { for: "key" }, "Key"), field, wrong, h("div", { class: "row" }, h("button", { class: "button main", type: "submit" }, "Use this key"))));
    this.dialog.addEventListener("close", () => { this.dialog.remove(); this.dialog = null; });
    this.append(this.dialog);
    this.dialog.showModal();
    field.focus();
  }

  async tryKey(wrong) {
    try {
      await get("view/info");
    } catch (error) {
      wrong.textContent = error.message;
      return;
    }
    this.dialog.close();
    if (!this.info) await this.connect();
  }
}

customElements.define("q-app", App);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") document.querySelector("q-app").close();
});
