// Sparkline and treemap charts, without a library.

import { el, size, svg } from "./dom.js";

const WIDTH = 300, HEIGHT = 60, WINDOW = 12;

/** Hit ratio per step, over the preceding minute; null without prompt tokens. */
export function shares({ prompt_tokens: prompt, cached_tokens: cached }) {
  const sum = (values, i) => values.slice(Math.max(0, i - WINDOW + 1), i + 1).reduce((a, b) => a + b, 0);
  return prompt.map((_, i) => (sum(prompt, i) ? sum(cached, i) / sum(prompt, i) : null));
}

/** Draws ratios over time, the newest at the right; `steps` is the number that fits. */
export function sparkline(found, steps, label) {
  const made = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  made.append(svg("path", { class: "base", d: `M0 ${HEIGHT - 0.5}H${WIDTH}M0 .5H${WIDTH}` }));
  const x = (i) => (WIDTH * (steps - found.length + i)) / (steps - 1), y = (share) => 1 + (HEIGHT - 2) * (1 - share);
  for (const run of runs(found)) {
    const points = run.map(([i, share]) => `${x(i).toFixed(1)} ${y(share).toFixed(1)}`);
    if (points.length === 1) points.push(`${(x(run[0][0]) + 1).toFixed(1)} ${y(run[0][1]).toFixed(1)}`);
    const line = `M${points.join("L")}`;
    made.append(svg("path", { class: "area", d: `${line}V${HEIGHT}H${x(run[0][0]).toFixed(1)}Z` }), svg("path", { class: "line", d: line }));
  }
  return made;
}

function runs(found) {
  const all = [];
  found.forEach((share, i) => {
    if (share === null) return;
    if (i && found[i - 1] !== null) all.at(-1).push([i, share]);
    else all.push([[i, share]]);
  });
  return all;
}

/** Squarified treemap (Bruls, Huizing, van Wijk 2000): `items` with a `value` above 0, largest first, into
 *  `[{item, x, y, width, height}]` in a box of the given size. */
export function squarified(items, width, height) {
  const total = items.reduce((sum, item) => sum + item.value, 0);
  const placed = [], box = { x: 0, y: 0, width, height };
  const scale = (width * height) / total;
  let row = [], left = [...items];
  const side = () => Math.min(box.width, box.height);
  const worst = (cells) => {
    const areas = cells.map((item) => item.value * scale), sum = areas.reduce((a, b) => a + b, 0);
    return Math.max(...areas.map((area) => Math.max((side() ** 2 * area) / sum ** 2, sum ** 2 / (side() ** 2 * area))));
  };
  const lay = () => {
    const area = row.reduce((sum, item) => sum + item.value * scale, 0), thick = area / side();
    const upright = box.width >= box.height;
    let at = upright ? box.y : box.x;
    for (const item of row) {
      const long = (item.value * scale) / thick;
      placed.push(upright ? { item, x: box.x, y: at, width: thick, height: long } : { item, x: at, y: box.y, width: long, height: thick });
      at += long;
    }
    if (upright) Object.assign(box, { x: box.x + thick, width: box.width - thick });
    else Object.assign(box, { y: box.y + thick, height: box.height - thick });
    row = [];
  };
  while (left.length) {
    if (!row.length || worst([...row, left[0]]) <= worst(row)) row.push(left.shift());
    else lay();
  }
  if (row.length) lay();
  return placed;
}

/** A tenant's colour, derived from its hash; dark enough for white text. */
export function colour(tenant) {
  return `hsl(${Number.parseInt(tenant.slice(0, 4), 16) % 360} 42% 34%)`;
}

/** Draws a treemap of bytes per tenant; `items` are `{tenant, name, value}`. */
export function treemap(items, label) {
  const made = el("div", { class: "map", role: "img", "aria-label": label });
  if (!items.length) made.append(el("div", { class: "none", text: "Nothing is stored here yet." }));
  for (const { item, x, y, width, height } of squarified(items, 100, 48)) {
    const cell = el("div", { title: `${item.name}, ${item.tenant}: ${size(item.value)}` });
    Object.assign(cell.style, {
      left: `${x}%`, top: `${(y / 48) * 100}%`, width: `${width}%`, height: `${(height / 48) * 100}%`,
      background: colour(item.tenant),
    });
    if (width > 22 && height > 14) cell.append(el("b", { text: item.name }), size(item.value));
    made.append(cell);
  }
  return made;
}
