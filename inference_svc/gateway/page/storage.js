// What stays in this browser: the conversation and the settings; the key and the salt only as long as the tab.

const CHAT = "kvsidecar.chat", SETTINGS = "kvsidecar.settings", THEME = "kvsidecar.theme";
const KEY = "kvsidecar.key", SALT = "kvsidecar.salt";

export const DEFAULTS = { model: "", temperature: 0.7, maxTokens: 256, reuse: true };

/** `store` is named: where a browser keeps nothing, already its mention is an error. */
function read(store, name, otherwise) {
  try {
    return JSON.parse(globalThis[store].getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** False when the browser keeps nothing, or no more. */
function write(store, name, value) {
  try {
    if (value === null || value === "") globalThis[store].removeItem(name);
    else globalThis[store].setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** `{context, turns}` as it was left, or an empty one. */
export function loadChat() {
  const found = read("localStorage", CHAT, {});
  return { context: String(found.context ?? ""), turns: Array.isArray(found.turns) ? found.turns : [] };
}

/** Whether a conversation is kept, be it an empty one. */
export const hasChat = () => read("localStorage", CHAT, null) !== null;

/** Nothing of it stays, and other tabs are told by their `storage` event. */
export const forgetChat = () => write("localStorage", CHAT, null);

/** Keeps the conversation; if it is too large with what was read of every prompt, without that. False if it cannot. */
export function saveChat(chat) {
  const bare = (turn) => ({ ...turn, parts: undefined });
  return write("localStorage", CHAT, { ...chat, turns: chat.turns.map((t, i) => (i === chat.turns.length - 1 ? t : bare(t))) })
    || write("localStorage", CHAT, { ...chat, turns: chat.turns.map(bare) });
}

export const loadSettings = () => ({ ...DEFAULTS, ...read("localStorage", SETTINGS, {}) });
export const saveSettings = (settings) => write("localStorage", SETTINGS, settings);

// Where the browser keeps nothing, these hold until the page is left.
const held = new Map();
const ofTab = (name) => held.get(name) ?? read("sessionStorage", name, "");
function holdForTab(name, text) {
  held.set(name, text);
  write("sessionStorage", name, text);
}

export const apiKey = () => ofTab(KEY);
export const setApiKey = (key) => holdForTab(KEY, key);
export const salt = () => ofTab(SALT);
export const setSalt = (text) => holdForTab(SALT, text);

/** The theme is plain text: `theme.js` reads it before any module is there. */
export function setTheme(name) {
  try {
    localStorage.setItem(THEME, name);
  } catch { /* it holds until the page is left */ }
}
