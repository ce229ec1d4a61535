// Texts, streams and tool loops with the Vercel AI SDK over each of the three protocols: prints JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, jsonSchema, Output, streamText, tool } from "ai";

const [url, name] = process.argv.slice(2);
const options = { baseURL: `${url}/v1`, apiKey: "none" };
const models = {
  chat: createOpenAICompatible({ name: "kvsidecar", ...options, includeUsage: true, supportsStructuredOutputs: true })(name),
  responses: createOpenAI(options).responses(name),
  messages: createAnthropic(options)("claude-test"),
};
const schema = jsonSchema({
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
});
const prompt = "How is the weather in Oslo?";
const found = {};
for (const [protocol, model] of Object.entries(models)) {
  const asked = [];
  const weather = tool({
    description: "Tells the weather of a city.",
    inputSchema: schema,
    execute: async ({ city }) => {
      asked.push(city);
      return "dry";
    },
  });
  const loop = {
    model,
    prompt,
    tools: { weather },
    maxOutputTokens: 60,
    maxRetries: 0,
    stopWhen: isStepCount(2),
    // A small model calls no tool by itself, and would call it again for ever.
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  };
  const whole = await generateText(loop);
  const stream = streamText(loop);
  let text = "";
  for await (const part of stream.textStream) text += part;
  const steps = await stream.steps;
  const structured = await generateText({ model, prompt, maxOutputTokens: 60, maxRetries: 0, output: Output.object({ schema }) });
  found[protocol] = {
    asked,
    steps: [whole.steps.length, steps.length],
    finish: [whole.steps[0].finishReason, steps[0].finishReason],
    texts: [whole.text, text, await stream.text],
    usage: (await stream.usage).inputTokens,
    structured: structured.output,
  };
}
console.log(JSON.stringify(found));
