// Prompt provenance (cached, relocated, computed) as a strip and as coloured text; TTFT with and without the cache.

import { count, duration, el, ratio } from "./dom.js";

const KINDS = {
  exact: ["read before, here", "It begins the prompt as it began an earlier one: exactly what computing it gives."],
  moved: ["read before, elsewhere", "Read in another context and moved to where it stands now."],
  repaired: ["moved and repaired", "Moved, and computed again in all but the first layers."],
  computed: ["computed now", "Read for the first time."],
};

function sums(parts) {
  const found = { exact: 0, moved: 0, repaired: 0, computed: 0 };
  for (const part of parts) found[part.reading] += part.tokens;
  return found;
}

/** Draws the prompt as a strip; a part's length is its number of tokens. */
export function strip(parts) {
  const label = Object.entries(sums(parts)).filter(([, n]) => n).map(([kind, n]) => `${count(n)} ${KINDS[kind][0]}`);
  const made = el("div", { class: "strip", role: "img", "aria-label": `Tokens of the prompt: ${label.join(", ")}.` });
  for (const part of merged(parts)) {
    const piece = el("i", { class: part.reading });
    piece.style.flexGrow = part.tokens;
    made.append(piece);
  }
  return made;
}

/** Merges small parts of recomputed tokens, so that all stripes are visible. */
function merged(parts) {
  if (parts.length <= 60) return parts;
  return Object.entries(sums(parts)).map(([reading, tokens]) => ({ reading, tokens })).filter((p) => p.tokens);
}

/** Says why tokens of the prompt were computed, and what would help. */
export function reason(miss) {
  const part = miss.part ? ` It is in ${miss.part}.` : "";
  const made = el("p", { class: "reason", text: `${sentence(miss.sentence)}${part}` });
  if (miss.advice) made.append(" ", el("span", { text: sentence(miss.advice) }));
  return made;
}

const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

/** Renders the prompt's text in colours, with a legend; the reason stands where the miss begins. */
export function reading(parts, miss) {
  const key = el("ul", { class: "key" });
  for (const [kind, tokens] of Object.entries(sums(parts))) {
    if (!tokens && kind !== "computed" && kind !== "exact") continue;
    key.append(el("li", { title: KINDS[kind][1] }, el("i", { class: kind }), el("b", { text: count(tokens) }), KINDS[kind][0]));
  }
  if (!parts.some((part) => part.text)) {
    return el("div", { class: "reading" }, key, el("p", { class: "note", text: "The page keeps the prompt's text of the last answer only." }));
  }
  const prompt = el("div", { class: "prompt", tabindex: "0", role: "region", "aria-label": "The prompt as the model has it" });
  let noted = !miss;
  for (const part of parts) {
    if (!noted && part.reading === "computed") {
      noted = true;
      prompt.append(el("span", { class: "why", text: miss.kind.replaceAll("_", " "), title: miss.sentence }));
    }
    if (part.text) prompt.append(el("mark", { class: part.reading, title: KINDS[part.reading][0], text: part.text }));
  }
  return el("div", { class: "reading" }, key, prompt);
}

/** Draws two bars: time to first token with and without the cache. */
export function race(withMs, withoutMs, cachedTokens) {
  const longest = Math.max(withMs, withoutMs, 1e-3);
  const made = el("div", { class: "race" });
  for (const [label, ms, kind] of [["With the cache", withMs, "with"], ["Without", withoutMs, "without"]]) {
    const bar = el("i", { class: kind });
    bar.style.width = `${(ms / longest) * 100}%`;
    made.append(el("span", { text: label }), el("div", {}, bar), el("b", { text: duration(ms) }));
  }
  const faster = withoutMs / withMs;
  let said = "About the same: there was little to save in this prompt.";
  if (!cachedTokens) said = "Nothing of this prompt had been read before, so there was nothing to save.";
  else if (faster >= 1.15) said = `The first token came ${ratio(faster)} times sooner with the cache.`;
  else if (faster < 0.87) said = "The cache did not help this time.";
  made.append(el("p", { text: said }));
  return made;
}
