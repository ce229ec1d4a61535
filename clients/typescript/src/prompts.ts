import type { Chat } from "../gen/kvsidecar/inference/v1/Chat.js";
import type { ChatMessage } from "../gen/kvsidecar/inference/v1/ChatMessage.js";
import type { Prompt } from "../gen/kvsidecar/inference/v1/Prompt.js";

/** A conversation, rendered with the model's template; `more` has the other fields of the message Chat, such as tools.
   */
export function chat(messages: ChatMessage[], more: Omit<Chat, "messages"> = {}): Prompt {
  return { chat: { ...more, messages } };
}

/** Plain text without a chat template: a chat model continues it instead of answering it. */
export function text(text: string): Prompt {
  return { text };
}

/** Token ids, used as they are. */
export function tokens(ids: number[]): Prompt {
  return { tokenIds: { ids } };
}
