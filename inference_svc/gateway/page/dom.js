// DOM helpers and number formats. All content is inserted as text nodes, never as HTML.

export const byId = (id) => document.getElementById(id);

/** Creates an element with properties (class, text, attributes, on* listeners) and children (nodes, texts, nothing). */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") made.className = value;
    else if (name === "text") made.textContent = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== undefined && child !== null));
  return made;
}

/** Creates an SVG element with attributes. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const count = (n) => whole.format(n);
export const percent = (share) => `${whole.format(share * 100)} %`;
export const some = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

/** Formats milliseconds. */
export function duration(ms) {
  if (ms < 10) return `${tenth.format(ms)} ms`;
  return ms < 1000 ? `${whole.format(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}

export function ratio(n) {
  return n < 10 ? tenth.format(n) : whole.format(n);
}

export function size(bytes) {
  let unit = 0, left = bytes;
  for (; left >= 1024 && unit < 4; unit++) left /= 1024;
  return `${unit && left < 10 ? tenth.format(left) : whole.format(left)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}
