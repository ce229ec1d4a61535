// What stays in this browser: the conversation and the settings; the key and the salt only as long as the tab.

const CHAT = "kvsidecar.chat", SETTINGS = "kvsidecar.settings", THEME = "kvsidecar.theme";
const KEY = "kvsidecar.key", SALT = "kvsidecar.salt";

export const DEFAULTS = { model: "", temperature: 0.7, maxTokens: 256, reuse: true };

function read(store, name, otherwise) {
  try {
    return JSON.parse(store.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** False when the browser keeps nothing, or no more. */
function write(store, name, value) {
  try {
    if (value === null || value === "") store.removeItem(name);
    else store.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** `{context, turns}` as it was left, or an empty one. */
export function loadChat() {
  const found = read(localStorage, CHAT, {});
  return { context: String(found.context ?? ""), turns: Array.isArray(found.turns) ? found.turns : [] };
}

/** Keeps the conversation; if it is too large with what was read of every prompt, without that. */
export function saveChat(chat) {
  if (!chat.turns.length && !chat.context) return write(localStorage, CHAT, null);
  const bare = (turn) => ({ ...turn, parts: undefined });
  return write(localStorage, CHAT, { ...chat, turns: chat.turns.map((t, i) => (i === chat.turns.length - 1 ? t : bare(t))) })
    || write(localStorage, CHAT, { ...chat, turns: chat.turns.map(bare) });
}

export const loadSettings = () => ({ ...DEFAULTS, ...read(localStorage, SETTINGS, {}) });
export const saveSettings = (settings) => write(localStorage, SETTINGS, settings);

export const apiKey = () => read(sessionStorage, KEY, "");
export const setApiKey = (key) => write(sessionStorage, KEY, key);
export const salt = () => read(sessionStorage, SALT, "");
export const setSalt = (text) => write(sessionStorage, SALT, text);

/** The theme is plain text: `theme.js` reads it before any module is there. */
export function setTheme(name) {
  try {
    localStorage.setItem(THEME, name);
  } catch { /* it holds until the page is left */ }
}
