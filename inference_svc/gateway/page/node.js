// Node status panel: polled every two seconds while the tab is visible.

import { node } from "./api.js";
import { colour, shares, sparkline, treemap } from "./charts.js";
import { byId, count, duration, el, percent, size, some } from "./dom.js";

const EVERY_MS = 2000, STEPS = 120, LISTED = 6;
// Label of tenants without a name: the node only has a hash of their salt.
const NAMELESS = "another salt or model";
const SAID = { ready: "ready", busy: "busy", down: "went away, being started again", starting: "loading the model" };

export class NodePanel extends EventTarget {
  /** Emits "state" (`ready`, number of workers), "key" when a key is required, "operator" when one is possible. */
  constructor() {
    super();
    this._tier = "arena";
    this._timer = null;
    this._asking = false;
    document.addEventListener("visibilitychange", () => this.start());
  }

  /** Polls now, and continues while the tab is visible. */
  start() {
    clearTimeout(this._timer);
    if (document.visibilityState === "visible" && !this._asking) this._poll();
  }

  async _poll() {
    this._asking = true;
    let wanted = true;
    try {
      this._found = await node();
      this._draw();
    } catch (error) {
      wanted = !error.keyWanted;
      byId("node").replaceChildren(el("p", { class: "note alarm", role: "status", text: error.message }));
      this._tell(0, 0);
      if (error.keyWanted) this.dispatchEvent(new Event("key"));
    }
    this._asking = false;
    clearTimeout(this._timer);
    if (wanted && document.visibilityState === "visible") this._timer = setTimeout(() => this._poll(), EVERY_MS);
  }

  _tell(ready, all) {
    this.dispatchEvent(new CustomEvent("state", { detail: { ready, all } }));
  }

  _draw() {
    const { workers, reuse, cache, operator } = this._found;
    this._tell(workers.filter((w) => w.state === "ready").length, workers.length);
    const panel = byId("node"), at = panel.scrollTop;
    const focused = panel.contains(document.activeElement) ? document.activeElement.dataset.act : null;
    const sections = [section("Workers", null, ...drawWorkers(workers)), drawReuse(reuse)];
    if (cache.failing) sections.push(section("Cache", null, el("p", { class: "note alarm", text: `${cache.failing}.` })));
    if (cache.tiers) sections.push(drawTiers(cache));
    if (cache.tenants) sections.push(this._drawMap(cache, operator));
    if (cache.calls?.length) sections.push(drawCalls(cache.calls));
    if (!operator) sections.push(this._drawOffer());
    panel.replaceChildren(...sections);
    panel.scrollTop = at;
    if (focused) panel.querySelector(`[data-act="${focused}"]`)?.focus();
  }

  _drawOffer() {
    const offer = el("button", { type: "button", class: "link", text: "With the operator key", "data-act": "key", onclick: () => this.dispatchEvent(new Event("operator")) });
    return el("section", {}, el("p", { class: "note" }, "You see what is yours. ", offer, " the whole node is shown."));
  }

  _drawMap(cache, operator) {
    const field = `${this._tier}_bytes`;
    const items = cache.tenants.map((t) => ({ ...t, name: t.name || NAMELESS, value: t[field] })).filter((t) => t.value > 0).sort((a, b) => b.value - a.value);
    const choice = el("span", { class: "choice", role: "group", "aria-label": "Tier" });
    for (const tier of ["arena", "disk"]) {
      choice.append(el("button", {
        type: "button", text: tier, "data-act": tier, "aria-pressed": String(tier === this._tier),
        onclick: () => {
          this._tier = tier;
          this._draw();
        },
      }));
    }
    const where = this._tier === "arena" ? "in the arena" : "on disk";
    const made = section(operator ? "Whose it is" : "Yours", choice, treemap(items, `Bytes ${where} by tenant: ${items.map((t) => `${t.name} (${t.tenant}) ${size(t.value)}`).join(", ") || "none"}.`));
    const list = el("ul", { class: "owners" });
    for (const item of items.slice(0, LISTED)) {
      const dot = el("span", { class: "dot" });
      dot.style.background = colour(item.tenant);
      list.append(el("li", {}, dot, el("span", { text: item.name }), el("code", { text: item.tenant }), el("span", { text: `${some(item.tokens, "token")} · ${size(item.value)}` })));
    }
    made.append(list);
    if (items.some((item) => item.name === NAMELESS)) made.append(el("p", { class: "note", text: "Of other salts and models only a hash is known, which begins so." }));
    const more = items.length - LISTED;
    if (more > 0) made.append(el("p", { class: "note", text: `And ${some(more, "tenant")} more.` }));
    if (!cache.complete) made.append(el("p", { class: "note", text: "Of the first 20,000 chunks." }));
    return made;
  }
}

function section(title, beside, ...children) {
  return el("section", {}, el("h2", {}, title, beside), ...children);
}

function drawWorkers(workers) {
  const list = el("ul", { class: "workers" });
  for (const worker of workers) {
    const state = worker.state === "ready" && worker.busy ? "busy" : worker.state;
    const line = el("li", { "data-worker": worker.name, "data-state": state }, el("span", { class: "dot", "data-state": state }), el("span", { text: worker.name }), el("em", { text: SAID[state] }));
    if (worker.running !== undefined) {
      const pool = worker.pool_tokens ? percent(worker.pool_used_tokens / worker.pool_tokens) : "–";
      const parts = [`${count(worker.running)} running, ${count(worker.waiting)} waiting`, `pool ${pool} in use`];
      if (!worker.cache_attached) parts.push("without the cache");
      line.append(el("small", { text: parts.join(" · ") }));
    }
    list.append(line);
  }
  const said = new Set(workers.map((worker) => worker.reuse_anywhere).filter(Boolean));
  return [list, ...[...said].map((text) => el("p", { class: "note", "data-note": "reuse-anywhere", text: `${text[0].toUpperCase()}${text.slice(1)}.` }))];
}

function drawReuse(reuse) {
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const read = sum(reuse.prompt_tokens), cached = sum(reuse.cached_tokens);
  const shown = read ? percent(cached / read) : "–";
  const made = section("Read before", el("b", { text: shown }), sparkline(shares(reuse), STEPS, `Share of prompt tokens that had been read before, last ten minutes: ${shown}.`));
  made.append(el("div", { class: "axis" }, el("span", { text: "10 min ago" }), el("span", { text: "now" })));
  made.append(el("p", { class: "note", text: read ? `${count(cached)} of ${some(read, "prompt token")} in ten minutes.` : "No prompt in the last ten minutes." }));
  return made;
}

function drawTiers({ tiers, evictions }) {
  const made = section("Tiers", null);
  for (const tier of tiers) {
    if (!tier.budget_bytes) continue;
    const share = Math.min(1, tier.used_bytes / tier.budget_bytes);
    const fill = el("i");
    fill.style.width = `${share * 100}%`;
    made.append(el("div", { class: "meter" },
      el("span", { text: tier.name === "arena" ? "Arena, in memory" : "Disk" }),
      el("span", { text: `${size(tier.used_bytes)} of ${size(tier.budget_bytes)}` }),
      el("div", { class: "rail", role: "meter", "aria-label": tier.name, "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": String(Math.round(share * 100)) }, fill),
      el("small", { text: `${some(tier.chunks, "chunk")} · ${some(evictions[tier.name], "eviction")}` })));
  }
  return made;
}

function drawCalls(calls) {
  const head = el("tr", {}, ...["Call", "a minute", "median", "p99"].map((name) => el("th", { scope: "col", text: name })));
  const rows = calls.map((c) => el("tr", {}, el("td", { text: c.method }), ...[count(c.count), duration(c.p50_ms), duration(c.p99_ms)].map((text) => el("td", { text }))));
  return section("Slowest calls", null, el("table", { class: "calls" }, el("thead", {}, head), el("tbody", {}, ...rows)));
}
