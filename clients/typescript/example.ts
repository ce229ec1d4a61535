// Streams an answer, then asks again: the second time the prompt is read from the cache.
// Run it against `kvsidecar serve`; an argument names another worker ("unix:/PATH" or "host:port").
import { Client, type GenerateRequest, KVSidecarError } from "./src/index.js";

const client = new Client(process.argv[2]);
const request: GenerateRequest = {
  prompt: { text: "The harbour was quiet that morning. ".repeat(20) },
  maxTokens: 24,
};

async function answer(): Promise<void> {
  for await (const part of client.stream(request, { deadlineMs: 60_000 })) {
    process.stdout.write(part.text);
    if (part.usage) {
      console.log(`\n[${part.usage.promptTokens} prompt tokens, ${part.usage.cachedTokens} from the cache]`);
    }
  }
}

try {
  await answer();
  await answer();
} catch (error) {
  if (!(error instanceof KVSidecarError)) throw error;
  if (error.reason === "UNAVAILABLE") console.error("no worker is there; start one with: kvsidecar serve");
  console.error(`${error.reason}: ${error.message}`);
  process.exitCode = 1;
} finally {
  client.close();
}
