// Asks a chat question and streams the answer, then asks again: the second time the prompt comes from the cache.
// Run it against `kvsidecar serve`; an argument names another worker ("unix:/PATH" or "host:port").
import { chat, Client, type GenerateRequest, KVSidecarError } from "./src/index.js";

const request: GenerateRequest = {
  prompt: chat([{ role: "user", content: "What is the capital of Germany?" }]),
  maxTokens: 24,
};

async function answer(client: Client): Promise<void> {
  for await (const part of client.stream(request, { deadlineMs: 60_000 })) {
    process.stdout.write(part.text);
    if (part.usage) {
      console.log(`\n[${part.usage.promptTokens} prompt tokens, ${part.usage.cachedTokens} from the cache]`);
    }
  }
}

let client: Client | undefined;
try {
  client = new Client(process.argv[2]);
  await answer(client);
  await answer(client);
} catch (error) {
  if (!(error instanceof KVSidecarError)) throw error;
  if (error.reason === "UNAVAILABLE") console.error("no worker is there; start one with: kvsidecar serve");
  console.error(`${error.reason}: ${error.message}`);
  process.exitCode = 1;
} finally {
  client?.close();
}
