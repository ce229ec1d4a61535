// Settings drawer, API key dialog, and theme switch.

import { byId, count, el } from "./dom.js";
import { loadSettings, salt, saveSettings, setApiKey, setSalt, setTheme } from "./storage.js";

export class Settings {
  constructor() {
    this.values = loadSettings();
    this._drawer = byId("settings");
    byId("open-settings").addEventListener("click", () => this.open());
    this._drawer.addEventListener("click", (event) => event.target === this._drawer && this._drawer.close());
    byId("temperature").addEventListener("input", () => this._take("temperature", Number(byId("temperature").value)));
    byId("max-tokens").addEventListener("change", () => this._take("maxTokens", whole(byId("max-tokens").value, this.values.maxTokens)));
    byId("reuse").addEventListener("change", () => this._take("reuse", byId("reuse").checked));
    byId("model-choice").addEventListener("change", () => this._take("model", byId("model-choice").value));
    byId("salt").addEventListener("change", () => setSalt(byId("salt").value));
    this._show();
  }

  open(field) {
    byId("salt").value = salt();
    this._show();
    this._drawer.showModal();
    if (field) byId(field).focus();
  }

  /** Shows the served models; a choice only with several. */
  offer(ids) {
    if (!ids.includes(this.values.model)) this.values.model = ids[0] ?? "";
    byId("model-choice").replaceChildren(...ids.map((id) => el("option", { value: id, text: id })));
    byId("model-field").hidden = ids.length < 2;
    this._show();
  }

  _take(name, value) {
    this.values[name] = value;
    saveSettings(this.values);
    this._show();
  }

  _show() {
    const { model, temperature, maxTokens, reuse } = this.values;
    byId("temperature").value = temperature;
    byId("temperature-shown").textContent = temperature.toFixed(2);
    byId("max-tokens").value = maxTokens;
    byId("reuse").checked = reuse;
    byId("model-choice").value = model;
  }
}

function whole(text, otherwise) {
  const found = Math.round(Number(text));
  return found >= 1 ? Math.min(found, 32768) : otherwise;
}

/** Opens the key dialog, once at a time; calls `then` with a key. */
export function askForKey(why, then) {
  const dialog = byId("key");
  if (dialog.open) return;
  byId("key-why").textContent = why;
  byId("key-value").value = "";
  byId("key-form").onsubmit = (event) => {
    event.preventDefault();
    setApiKey(byId("key-value").value.trim());
    dialog.close();
    then();
  };
  dialog.showModal();
}

/** Theme switch; initially the system's theme. */
export function themeSwitch() {
  const button = byId("theme"), system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const say = () => button.setAttribute("aria-label", dark() ? "Light theme" : "Dark theme");
  button.addEventListener("click", () => {
    const wanted = dark() ? "light" : "dark";
    document.documentElement.dataset.theme = wanted;
    setTheme(wanted);
    say();
  });
  system.addEventListener("change", say);
  say();
}

/** Describes a text's length in one line. */
export const aboutText = (text) => `About a text of ${count(text.length)} characters: ${text.replace(/\s+/g, " ").slice(0, 120)}`;
