// Renders an answer's text: paragraphs, fenced code and `code`, all as text nodes.

import { el } from "./dom.js";

/** `[{code, text}]`; an open fence contains the rest of the text. */
export function blocks(text) {
  const found = [];
  let code = null, lines = [];
  const close = () => {
    const joined = lines.join("\n");
    if (code !== null || joined.trim()) found.push({ code: code !== null, text: code !== null ? joined : joined.trim() });
    lines = [];
  };
  for (const line of text.split("\n")) {
    if (/^\s*```/.test(line)) {
      close();
      code = code === null ? line : null;
    } else if (code === null && !line.trim()) close();
    else lines.push(line);
  }
  if (lines.length || code !== null) close();
  return found;
}

function drawn({ code, text }) {
  if (code) return el("pre", { tabindex: "0" }, el("code", { text }));
  const pieces = text.split(/`([^`\n]+)`/);
  return el("p", {}, ...pieces.map((piece, i) => (i % 2 ? el("code", { text: piece }) : piece)).filter((p) => p !== ""));
}

/** Renders text into an element; keeps unchanged blocks, so that selections survive. */
export function draw(into, text) {
  const wanted = blocks(text);
  wanted.forEach((block, i) => {
    const there = into.children[i], mark = `${block.code} ${block.text}`;
    if (there?.written === mark) return;
    const made = drawn(block);
    made.written = mark;
    if (there) there.replaceWith(made);
    else into.append(made);
  });
  while (into.children.length > wanted.length) into.lastElementChild.remove();
}
