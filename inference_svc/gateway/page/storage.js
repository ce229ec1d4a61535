// Browser storage: conversation and settings in localStorage; key and salt only per tab.

const CHAT = "kvsidecar.chat", SETTINGS = "kvsidecar.settings", THEME = "kvsidecar.theme";
const KEY = "kvsidecar.key", SALT = "kvsidecar.salt";

export const DEFAULTS = { model: "", temperature: 0.7, maxTokens: 256, reuse: true };

/** Takes the store's name: without storage, even accessing the object throws. */
function read(store, name, otherwise) {
  try {
    return JSON.parse(globalThis[store].getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** Returns false when storage is disabled or full. */
function write(store, name, value) {
  try {
    if (value === null || value === "") globalThis[store].removeItem(name);
    else globalThis[store].setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** Returns the stored `{context, turns}`, or an empty one. */
export function loadChat() {
  const found = read("localStorage", CHAT, {});
  return { context: String(found.context ?? ""), turns: Array.isArray(found.turns) ? found.turns : [] };
}

/** Whether a conversation is stored, even an empty one. */
export const hasChat = () => read("localStorage", CHAT, null) !== null;

/** Deletes the conversation; other tabs get a `storage` event. */
export const forgetChat = () => write("localStorage", CHAT, null);

/** Stores the conversation; older turns keep the lengths of their prompts' parts, not the texts. Returns false on failure. */
export function saveChat(chat) {
  const brief = (turn) => ({ ...turn, parts: turn.parts?.map(({ reading, tokens }) => ({ reading, tokens })) });
  const bare = (turn) => ({ ...turn, parts: undefined });
  return write("localStorage", CHAT, { ...chat, turns: chat.turns.map((t, i) => (i === chat.turns.length - 1 ? t : brief(t))) })
    || write("localStorage", CHAT, { ...chat, turns: chat.turns.map(brief) })
    || write("localStorage", CHAT, { ...chat, turns: chat.turns.map(bare) });
}

export const loadSettings = () => ({ ...DEFAULTS, ...read("localStorage", SETTINGS, {}) });
export const saveSettings = (settings) => write("localStorage", SETTINGS, settings);

// Without storage, these values last until the page is closed.
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

/** The theme is stored as plain text: `theme.js` reads it before modules load. */
export function setTheme(name) {
  try {
    localStorage.setItem(THEME, name);
  } catch { /* without storage it lasts until the page is closed */ }
}
