// Messages, streams, a tool call in two steps, counts and errors with Anthropic's TypeScript SDK: prints JSON.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "k", maxRetries: 0 });
const model = "demo";
const hello = [{ role: "user", content: "hello there" }];
const keep = {
  name: "keep",
  input_schema: {
    type: "object",
    properties: { note: { enum: ["one", "two"] } },
    required: ["note"],
    additionalProperties: false,
  },
};
const found = {};

const whole = await client.messages.create({ model, max_tokens: 4, messages: hello });
found.whole = whole;

const stream = client.messages.stream({
  model,
  max_tokens: 90,
  messages: hello,
  tools: [keep],
  tool_choice: { type: "tool", name: "keep" },
});
found.kinds = [];
for await (const event of stream) found.kinds.push(event.type);
const first = await stream.finalMessage();
found.call = first.content[0];

const talk = [
  ...hello,
  { role: "assistant", content: first.content },
  { role: "user", content: [{ type: "tool_result", tool_use_id: first.content[0].id, content: "kept" }] },
];
found.second = await client.messages.create({
  model,
  max_tokens: 4,
  messages: talk,
  tools: [keep],
  tool_choice: { type: "none" },
});
found.counted = (await client.messages.countTokens({ model, messages: talk, tools: [keep] })).input_tokens;

try {
  await client.messages.create({ model: "other", max_tokens: 1, messages: hello });
} catch (error) {
  found.error = { kind: error.constructor.name, status: error.status, type: error.type, id: error.requestID };
}
console.log(JSON.stringify(found));
