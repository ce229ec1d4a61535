// Entry point of the page: creates its components and connects their events.

import { models } from "./api.js";
import { Conversation } from "./conversation.js";
import { byId, el, some } from "./dom.js";
import { NodePanel } from "./node.js";
import { STARTERS } from "./samples.js";
import { aboutText, askForKey, Settings, themeSwitch } from "./settings.js";
import { apiKey } from "./storage.js";

const settings = new Settings();
const conversation = new Conversation(() => settings.values);
const panel = new NodePanel();
const question = byId("question");

// ---- input ----------------------------------------------------------------------------------------------------

function send() {
  const text = question.value.trim();
  if (!text || conversation.busy) return;
  question.value = "";
  fit();
  conversation.ask(text).then(() => panel.start());
}

/** Fits a field's height to its text, in browsers where CSS cannot do that. */
function fit() {
  if (CSS.supports("field-sizing", "content")) return;
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
}

function stop() {
  conversation.stop();
  question.focus();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
question.addEventListener("input", fit);
byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && conversation.busy && !document.querySelector("dialog[open]")) stop();
});

// ---- the conversation -----------------------------------------------------------------------------------------

function showConversation() {
  byId("empty").hidden = !conversation.empty;
  byId("kept").hidden = conversation.empty && !conversation.context;
  byId("kept-said").textContent = conversation.saved ? "Kept in this browser." : "Not kept: this browser stores no more.";
  byId("send").hidden = conversation.busy;
  byId("stop").hidden = !conversation.busy;
  byId("about").hidden = !conversation.context;
  byId("about-text").textContent = conversation.context ? aboutText(conversation.context) : "";
}

conversation.addEventListener("change", showConversation);
byId("new-chat").addEventListener("click", () => {
  conversation.clear();
  question.focus();
});
byId("forget").addEventListener("click", () => {
  conversation.forget();
  question.focus();
});
byId("about-change").addEventListener("click", () => openSettings("context"));
byId("open-settings").addEventListener("click", () => (byId("context").value = conversation.context));
byId("context").addEventListener("input", () => (conversation.context = byId("context").value));
addEventListener("pagehide", () => conversation.keep());
addEventListener("storage", () => conversation.follow());
addEventListener("pageshow", ({ persisted }) => persisted && conversation.follow());  // it missed events of other tabs meanwhile

function openSettings(field) {
  byId("context").value = conversation.context;
  settings.open(field);
}

byId("starters").append(...STARTERS.map((starter) => el("li", {}, el("button", {
  type: "button",
  onclick: () => {
    if (starter.context) conversation.context = starter.context;
    question.value = starter.question;
    fit();
    question.focus();
  },
}, starter.title, el("small", { text: starter.note })))));

// ---- the node -------------------------------------------------------------------------------------------------

async function findModels() {
  try {
    const ids = (await models()).map((model) => model.id);
    settings.offer(ids);
    byId("model-name").textContent = settings.values.model;
    byId("gibberish").hidden = !ids.includes("demo");
  } catch (error) {
    if (error.keyWanted) wantKey();
  }
}

function wantKey() {
  const again = apiKey() ? "That key was refused. " : "";
  askForKey(`${again}The operator of this node has one for you. It stays in this tab.`, () => {
    findModels();
    panel.start();
  });
}

let modelsWanted = true;
panel.addEventListener("state", ({ detail: { ready, all } }) => {
  byId("dot").dataset.state = ready ? "ready" : "down";
  byId("model").title = `${ready} of ${some(all, "worker")} ready`;
  if (ready && modelsWanted) findModels();
  modelsWanted = !ready;
});
panel.addEventListener("key", wantKey);
panel.addEventListener("operator", () => askForKey("The operator's shows the whole node. It stays in this tab.", () => panel.start()));
conversation.addEventListener("key", wantKey);
byId("model-choice").addEventListener("change", () => (byId("model-name").textContent = settings.values.model));

for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.show;
    for (const other of document.querySelectorAll("[data-show]")) other.setAttribute("aria-pressed", String(other === button));
  });
}

themeSwitch();
showConversation();
panel.start();
if (matchMedia("(hover: hover)").matches) question.focus();
