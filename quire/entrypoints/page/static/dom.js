// Elements without a framework. Texts become text nodes, never HTML.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const PATHS = {
  sun: ["M12 4V2M12 22v-2M4 12H2M22 12h-2M6 6 4.6 4.6M19.4 19.4 18 18M6 18l-1.4 1.4M19.4 4.6 18 6", "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8z"],
  moon: ["M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z"],
  sliders: ["M4 7h9M17 7h3M4 17h3M11 17h9", "M15 5a2 2 0 1 0 0 4 2 2 0 0 0 0-4zM9 15a2 2 0 1 0 0 4 2 2 0 0 0 0-4z"],
  list: ["M4 6h16M4 12h16M4 18h10"],
  plus: ["M12 5v14M5 12h14"],
  key: ["M4 12a4 4 0 1 0 8 0 4 4 0 1 0-8 0zM12 12h9M17.5 12v3M21 12v2"],
  up: ["M12 19V5M6 11l6-6 6 6"],
  stop: ["M7 7h10v10H7z"],
  bin: ["M5 7h14M10 7V5h4v2M7 7l1 12h8l1-12"],
};

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  for (const d of PATHS[name]) {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", d);
    svg.append(path);
  }
  return svg;
}

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { value: text, class: "hidden-text" });
    document.body.append(area);
    area.select();
    document.execCommand("copy"); // pages that are not served over TLS or from this machine have no clipboard
    area.remove();
  }
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = before; }, 1200);
}

export function announce(text) {
  const region = document.getElementById("announcer");
  if (region) region.textContent = text;
}

export const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

export function download(name, blob) {
  const url = URL.createObjectURL(blob);
  const link = h("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export const count = (value) => Number(value).toLocaleString("en");

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${value < 0.01 ? (value * 1e3).toFixed(1) : Math.round(value * 1e3)} ms`;
  return `${value < 10 ? value.toFixed(2) : value.toFixed(1)} s`;
}
