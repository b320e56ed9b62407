// The KV cache as a picture: a cell for each block, or for a few of them where they are many.

import { fit } from "./plot.js";

const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const KINDS = ["free", "cached", "used", "shared"];

// A block's state: bits 0 and 1 owners, 2 findable, the rest 1 + its group.
export const kindOf = (state) => { const owners = state & 3; return owners === 0 ? (state & 4 ? 1 : 0) : owners === 1 ? 2 : 3; };
export const groupOf = (state) => (state >> 3) - 1;

// [state, length, state, length, ...], or base64 of a byte each.
export function applyStates(map, first, states) {
  if (Array.isArray(states)) {
    let at = first;
    for (let i = 0; i < states.length; i += 2) {
      map.fill(states[i], at, at + states[i + 1]);
      at += states[i + 1];
    }
  } else {
    const text = atob(states);
    for (let i = 0; i < text.length; i++) map[first + i] = text.charCodeAt(i);
  }
}

export function layout(total, width, height) {
  let cell = Math.floor(Math.sqrt(width * height / Math.max(1, total)));
  cell = Math.max(3, Math.min(14, cell));
  for (; cell > 3 && Math.ceil(total / Math.floor(width / cell)) * cell > height; cell--);
  const columns = Math.max(1, Math.floor(width / cell)), rows = Math.max(1, Math.floor(height / cell));
  const per = Math.max(1, Math.ceil(total / (columns * rows))); // blocks in a cell
  return { cell, columns, rows, per };
}

export function drawBlocks(canvas, map, byGroup) {
  const { context, width, height } = fit(canvas);
  const { cell, columns, per } = layout(map.length, width, height);
  const gap = cell >= 4 ? 1 : 0;
  const x = (column) => Math.round(column * (width + gap) / columns); // to the edge: some columns are a pixel wider
  const colors = { free: variable("--free"), cached: variable("--cached"), used: variable("--used"), shared: variable("--shared") };
  const groups = [0, 1, 2, 3, 4, 5].map((i) => variable(`--group-${i}`));
  const cells = new Map(); // color -> cells: few changes of the fill
  const count = Math.ceil(map.length / per);
  for (let i = 0; i < count; i++) {
    let kind = 0, group = -1;
    for (let j = i * per; j < Math.min(map.length, (i + 1) * per); j++) { // the most telling of a cell's blocks
      const own = kindOf(map[j]);
      if (own > kind || j === i * per) {
        kind = own;
        group = groupOf(map[j]);
      }
    }
    const fill = byGroup && kind > 1 && group >= 0 ? groups[group % groups.length] : colors[KINDS[kind]];
    if (!cells.has(fill)) cells.set(fill, []);
    cells.get(fill).push(i);
  }
  for (const [fill, places] of cells) {
    context.fillStyle = fill;
    for (const i of places) {
      const left = x(i % columns);
      context.fillRect(left, Math.floor(i / columns) * cell, x((i % columns) + 1) - left - gap, cell - gap);
    }
  }
}
