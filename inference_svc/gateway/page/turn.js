// Renders one turn: a question, or an answer with its statistics and actions.

import { count, duration, el } from "./dom.js";
import { draw } from "./prose.js";
import { race, reading, reason, strip } from "./reuse.js";

export function question(text) {
  return el("div", { class: "turn user", text });
}

/** An answer's view. `asks` has `compare(turn)` and `retry(turn)`; `show(turn)` renders the current state. */
export class Answer {
  constructor(asks) {
    this._asks = asks;
    this._reasoning = el("p", { class: "reasoning", hidden: true });
    this._prose = el("div", { class: "prose" });
    this._problem = el("p", { class: "problem", role: "alert", hidden: true });
    this._stopped = el("p", { class: "stopped", hidden: true });
    this._facts = el("div", { class: "facts", hidden: true });
    this._open = false;
    this.element = el("article", { class: "turn answer", "aria-label": "Answer" }, this._reasoning, this._prose, this._stopped, this._problem, this._facts);
  }

  show(turn, { busy = false, last = false } = {}) {
    this.element.setAttribute("aria-busy", String(busy));
    draw(this._prose, turn.content);
    this._reasoning.textContent = turn.reasoning ?? "";
    this._reasoning.hidden = !turn.reasoning;
    this._stopped.textContent = turn.stopped ? "Stopped." : "The longest answer was reached before any text came.";
    this._stopped.hidden = !turn.stopped && (busy || Boolean(turn.content) || !turn.full);
    this._problem.hidden = !turn.problem;
    if (turn.problem) {
      this._problem.replaceChildren(turn.problem);
      if (last) this._problem.append(el("button", { type: "button", class: "link", text: "Try again", onclick: () => this._asks.retry() }));
    }
    this._facts.hidden = !turn.parts && turn.ttft === undefined;
    if (!this._facts.hidden) this._drawFacts(turn, busy);
  }

  _drawFacts(turn, busy) {
    const focused = this._facts.contains(document.activeElement) ? document.activeElement.dataset.act : null;
    const children = [];
    if (turn.parts) children.push(strip(turn.parts));
    children.push(numbers(turn));
    if (turn.miss) children.push(reason(turn.miss));
    if (!busy) children.push(this._acts(turn));
    if (turn.without !== undefined) children.push(race(turn.ttft, turn.without, turn.cached));
    if (turn.compareProblem) children.push(el("p", { class: "problem", role: "alert", text: turn.compareProblem }));
    if (turn.parts && this._open && !busy) children.push(reading(turn.parts, turn.miss));
    this._facts.replaceChildren(...children);
    if (focused) this._facts.querySelector(`[data-act="${focused}"]`)?.focus();
  }

  _acts(turn) {
    const made = el("div", { class: "acts" });
    if (turn.parts) {
      made.append(el("button", {
        type: "button", class: "quiet", "data-act": "read", "aria-expanded": String(this._open),
        text: this._open ? "Hide the prompt" : "What was reused",
        onclick: () => {
          this._open = !this._open;
          this.show(turn);
        },
      }));
    }
    if (turn.measured && !turn.past) {
      made.append(el("button", {
        type: "button", class: "quiet", "data-act": "compare", "aria-disabled": turn.comparing && "true",
        text: turn.comparing ? "Reading all of it again…" : "Ask again without the cache",
        onclick: () => this._asks.compare(turn, this),
      }));
    }
    return made;
  }
}

function numbers(turn) {
  const found = [["first token", turn.ttft === undefined ? "–" : duration(turn.ttft)]];
  if (turn.rate) found.push(["tokens per second", turn.rate < 10 ? turn.rate.toFixed(1) : count(turn.rate)]);
  if (turn.promptTokens !== undefined) {
    found.push(["prompt tokens", count(turn.promptTokens)], ["from the cache", count(turn.cached)]);
  }
  const made = el("dl", { class: "numbers" });
  for (const [name, value] of found) made.append(el("div", {}, el("dt", { text: name }), el("dd", { text: value })));
  return made;
}
