// Client of the gateway's HTTP API. Paths are relative to the page, so that it also works behind a prefix.

import { apiKey, salt } from "./storage.js";

/** An API error, in one sentence. `keyWanted`: the key is missing or wrong, and is not replaced yet. */
export class Trouble extends Error {
  constructor(text, status = 0, key = "") {
    super(text);
    this.keyWanted = status === 401 && key === apiKey();
  }
}

async function call(path, { body, signal } = {}) {
  const headers = {}, key = apiKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (salt()) headers["X-Cache-Salt"] = encodeURIComponent(salt());
  if (body) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(new URL(path, document.baseURI), {
      method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body), cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("The server does not answer; it may have ended, or the network is away.");
  }
  if (!answer.ok) throw new Trouble(await reason(answer), answer.status, key);
  return answer;
}

async function reason(answer) {
  try {
    return sentence((await answer.json()).error.message);
  } catch {
    return `The server answered with status ${answer.status} and no reason.`;
  }
}

function sentence(text) {
  const said = String(text).trim(), name = /^\w+[._]/.test(said);  // an option's name stays unchanged
  return (name ? said : said.charAt(0).toUpperCase() + said.slice(1)) + (/[.!?]$/.test(said) ? "" : ".");
}

export const models = async () => (await (await call("v1/models")).json()).data;
export const node = async () => (await call("kvsidecar/v1/node")).json();

/** Requests a complete answer. */
export async function chat(body, signal) {
  return (await call("v1/chat/completions", { body, signal })).json();
}

/** Yields an answer's events in OpenAI's format. Aborting the signal cancels the request, also at the worker. */
export async function* streamChat(body, signal) {
  const options = { stream: true, stream_options: { include_usage: true } };
  const answer = await call("v1/chat/completions", { body: { ...body, ...options }, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "", complete = false;
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      held += value;
      const events = held.split("\n\n");
      held = events.pop();
      for (const event of events) {
        // A stream that the server cuts off has an empty event before the error.
        if (!event.startsWith("data: ")) continue;
        const data = event.slice("data: ".length);
        if (data === "[DONE]") complete = true;
        else {
          const found = JSON.parse(data);
          if (found.error) throw new Trouble(sentence(found.error.message));
          yield found;
        }
      }
    }
  } catch (error) {
    if (error instanceof Trouble || error.name === "AbortError") throw error;
    throw new Trouble("The connection broke before the answer was whole.");
  }
  if (!complete) throw new Trouble("The connection ended before the answer was whole.");
}
