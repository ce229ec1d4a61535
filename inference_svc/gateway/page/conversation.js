// The conversation: requests, streamed answers, and storage in the browser.

import { chat, streamChat } from "./api.js";
import { byId } from "./dom.js";
import { forgetChat, hasChat, loadChat, saveChat, salt } from "./storage.js";
import { Answer, question } from "./turn.js";

export class Conversation extends EventTarget {
  /** Emits "change" when turns are added or removed or an answer begins or ends; "key" when a key is required. */
  constructor(settings) {
    super();
    this._settings = settings;
    this._kept = loadChat();
    this._stored = this._saved = hasChat();  // a part is stored; all of it is stored
    this._unsaved = false;  // there are changes since the last attempt
    this._log = byId("log");
    this._views = new Map();
    this._abort = null;
    this._draw();
  }

  get busy() { return this._abort !== null; }
  get empty() { return !this._kept.turns.length; }
  get context() { return this._kept.context; }
  /** Whether a reload restores the whole conversation. */
  get saved() { return this._saved; }

  /** Whether a turn can be repeated: its context must be unchanged. */
  set context(text) {
    if (text === this._kept.context) return;
    this._kept.context = text;
    for (const turn of this._views.keys()) {
      turn.past = true;
      this._draw1(turn);
    }
    this._save();
  }

  /** Starts a new conversation; the context stays. */
  clear() {
    this._begin(this._kept.context);
    this._save();
  }

  /** Deletes the conversation, here and in other tabs. */
  forget() {
    forgetChat();
    this._stored = this._saved = false;
    this._begin("");
  }

  /** Follows a deletion by another tab. */
  follow() {
    if (this._stored && !hasChat()) this.forget();
  }

  stop() { this._abort?.abort(); }

  /** Stores new turns; a conversation that another tab deleted stays deleted. */
  keep() {
    this.follow();
    if (!this._unsaved) return;
    this._unsaved = false;
    this._saved = saveChat(this._kept);
    this._stored ||= this._saved;
  }

  _begin(context) {
    this.stop();
    this._kept = { context, turns: [] };
    this._unsaved = false;
    this._draw();
  }

  async ask(text) {
    this.follow();
    this._add({ role: "user", content: text });
    await this._answer();
  }

  async _retry() {
    const failed = this._kept.turns.at(-1);
    if (this.busy || failed?.role !== "assistant") return;
    this._kept.turns.pop();
    this._views.get(failed).element.remove();
    await this._answer();
  }

  async _answer() {
    const body = this._body(this._messages(this._kept.turns.length));
    const turn = { role: "assistant", content: "", model: body.model };
    const abort = (this._abort = new AbortController());
    this._add(turn);
    const meter = new Meter(turn);
    try {
      for await (const event of streamChat(body, abort.signal)) {
        meter.take(event);
        this._unsaved ||= this._kept.turns.includes(turn);
        this._show(turn);
      }
    } catch (error) {
      if (error.name === "AbortError") turn.stopped = true;
      else {
        turn.problem = error.message;
        if (error.keyWanted) this.dispatchEvent(new Event("key"));
      }
    }
    if (this._abort === abort) this._abort = null;
    this._changed();
    if (!this._kept.turns.includes(turn)) return;
    this._draw1(turn);
    this._save();
    byId("said").textContent = turn.problem ? "" : turn.stopped ? "Stopped." : "The answer is whole.";
  }

  /** Repeats a request without the cache, to measure its time to first token. */
  async _compare(turn) {
    if (turn.comparing) return;
    turn.comparing = true;
    delete turn.compareProblem;
    this._draw1(turn);
    try {
      const messages = this._messages(this._kept.turns.indexOf(turn));
      const alike = { explain: false, skip_cache: true, max_tokens: 1, model: turn.model };
      const answer = await chat({ ...this._body(messages), ...alike });
      turn.without = answer.timings.ttft_ms;
    } catch (error) {
      turn.compareProblem = error.message;
      if (error.keyWanted) this.dispatchEvent(new Event("key"));
    }
    delete turn.comparing;
    if (!this._kept.turns.includes(turn)) return;
    this._draw1(turn);
    this._save();
  }

  _body(messages) {
    const { model, temperature, maxTokens, reuse } = this._settings();
    const own = salt() ? { cache_salt: salt() } : {};
    return { model, messages, temperature, max_tokens: maxTokens, skip_cache: !reuse, explain: true, ...own };
  }

  /** Messages before a turn, without unanswered questions. */
  _messages(end) {
    const found = this.context ? [{ role: "system", content: this.context }] : [];
    const turns = this._kept.turns.slice(0, end);
    turns.forEach((turn, i) => {
      const answered = i === turns.length - 1 || turns[i + 1].role === "user" || turns[i + 1].content;
      if (turn.content && (turn.role === "assistant" || answered)) found.push({ role: turn.role, content: turn.content });
    });
    return found;
  }

  // ---- rendering ----------------------------------------------------------------------------------------------

  _draw() {
    this._log.replaceChildren();
    this._views.clear();
    for (const turn of this._kept.turns) {
      delete turn.comparing;
      // The page was closed while the answer streamed.
      if (turn.role === "assistant" && !turn.measured && !turn.problem) turn.stopped = true;
      this._append(turn);
    }
    this._scroll();
    this._changed();
  }

  _add(turn) {
    this._kept.turns.push(turn);
    this._append(turn);
    this._save();
    this._scroll();
  }

  _append(turn) {
    if (turn.role === "user") {
      this._log.append(question(turn.content));
      return;
    }
    const view = new Answer({ compare: (t) => this._compare(t), retry: () => this._retry() });
    this._views.set(turn, view);
    this._log.append(view.element);
    this._draw1(turn);
  }

  _draw1(turn) {
    const last = turn === this._kept.turns.at(-1);
    this._views.get(turn)?.show(turn, { busy: this.busy && last, last });
  }

  /** Renders once per frame while text streams; keeps the end in view if it was. */
  _show(turn) {
    this._waiting ??= requestAnimationFrame(() => {
      this._waiting = null;
      const box = byId("scroll");
      const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
      this._draw1(turn);
      if (atEnd) this._scroll();
    });
  }

  _scroll() {
    const box = byId("scroll");
    box.scrollTo({ top: box.scrollHeight, behavior: "instant" });
  }

  _save() {
    this._unsaved = true;
    this.keep();
    this._changed();
  }

  _changed() { this.dispatchEvent(new Event("change")); }
}

/** Adds an answer's events to its turn: reasoning, text, times, tokens. */
class Meter {
  constructor(turn) {
    this._turn = turn;
    this._began = performance.now();
    this._pieces = 0;
  }

  take(event) {
    const turn = this._turn, now = performance.now();
    if (event.prompt_parts) {
      turn.parts = event.prompt_parts;
      const known = (kinds) => turn.parts.filter((p) => kinds.includes(p.reading)).reduce((n, p) => n + p.tokens, 0);
      turn.promptTokens = known(["exact", "moved", "repaired", "computed"]);
      turn.cached = known(["exact", "moved", "repaired"]);
    }
    if (event.miss !== undefined) turn.miss = event.miss;
    const choice = event.choices?.[0], text = choice?.delta?.content, reasoning = choice?.delta?.reasoning;
    if (reasoning) turn.reasoning = (turn.reasoning ?? "") + reasoning;
    if (choice?.finish_reason === "length") turn.full = true;
    if (text) {
      this._first ??= now;
      this._pieces += 1;
      turn.content += text;
      turn.ttft ??= this._first - this._began;
      if (now - this._first > 200) turn.rate = (this._pieces - 1) / ((now - this._first) / 1000);
    }
    if (event.timings) {
      const generated = event.usage.completion_tokens, decode = event.timings.decode_ms;
      turn.ttft = event.timings.ttft_ms;
      turn.promptTokens = event.usage.prompt_tokens;
      turn.cached = event.usage.prompt_tokens_details.cached_tokens;
      turn.rate = decode > 0 ? (generated - 1) / (decode / 1000) : undefined;
      turn.measured = true;
    }
  }
}
