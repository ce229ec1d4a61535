// Prints this client's view of a worker, one fact per line, for tests/clients: facts TARGET TEXT.
// Without a TEXT it prints its view of tests/clients/scripted_worker.py; without arguments the hashes of
// docs/protocol.md's test vectors, and checksums by length.
import { setTimeout } from "node:timers/promises";

import { type CacheOptions, chat, Client, type GenerateRequest, KVSidecarError } from "./src/index.js";
import * as keys from "./src/keys.js";

const MOST = 400;
const fact = (name: string, value: unknown) => console.log(`${name}\t${value}`);
const hex = (bytes: string | Uint8Array) => Buffer.from(bytes as string).toString("hex");
const greedy = (text: string, maxTokens: number): GenerateRequest => ({
  prompt: { text },
  maxTokens,
  sampling: { temperature: 0 },
  ignoreEos: true,
});

async function asked(client: Client, text: string): Promise<void> {
  fact("warm.stored_tokens", (await client.warm({ text })).storedTokens);
  const whole = await client.generate(greedy(text, 12));
  fact("generate.text", hex(whole.text));
  fact("generate.prompt_tokens", whole.usage?.promptTokens);
  fact("generate.cached_tokens", whole.usage?.cachedTokens);
  let [streamed, pieces] = ["", 0];
  for await (const part of client.stream(greedy(text, 12))) {
    streamed += part.text;
    pieces += 1;
    if (part.usage) fact("stream.generated_tokens", part.usage.generatedTokens);
  }
  fact("stream.text", hex(streamed));
  fact("stream.pieces", pieces);
  const question = chat([{ role: "user", content: text }]);
  const answer = await client.generate({ ...greedy("", 8), prompt: question, explain: true });
  fact("chat.text", hex(answer.text));
  fact("chat.reasoning", hex(answer.reasoning));
  fact("chat.miss", answer.miss?.kind);
}

async function failure(name: string, call: () => Promise<unknown>): Promise<void> {
  try {
    await call();
    fact(`${name}.reason`, "none");
  } catch (error) {
    if (!(error instanceof KVSidecarError)) throw error;
    fact(`${name}.reason`, error.reason);
    fact(`${name}.code`, error.code);
    fact(`${name}.message`, error.message);
    fact(`${name}.domain`, error.domain);
  }
}

async function hinted(client: Client, text: string): Promise<void> {
  const own = { text: `An agent's own notes: ${text}` };
  const cache: CacheOptions = {
    session: "agent",
    retainSeconds: 60,
    breakpoints: [{ tokens: 64, retainSeconds: 300 }],
    priority: "CACHE_PRIORITY_LOW",
  };
  await client.warm(own, {}, cache);
  fact("prefetch.stored_tokens", (await client.prefetch({ text })).storedTokens);
  fact("session.released_chunks", await client.releaseSession("agent"));
  await failure("no retention", () => client.warm(own, {}, { retainSeconds: 0 }));
}

async function ended(client: Client): Promise<void> {
  const stop = new AbortController();
  await failure("cancel", async () => {
    for await (const _ of client.stream(greedy("cancelled after its first piece", MOST), { signal: stop.signal })) {
      stop.abort();
    }
  });
  await failure("deadline", () => client.generate(greedy("more than can be said in a moment", MOST), { deadlineMs: 50 }));
  await failure("refused", () => client.generate(greedy("nothing may be asked for", 0)));
  await failure("negative", () => client.generate(greedy("less than nothing", -3)));
  await failure("negative in a stream", async () => {
    for await (const _ of client.stream({ ...greedy("less than nothing", 4), sampling: { topK: -3 } })) break;
  });
  const breakpoints = [{ tokens: -3 }];
  await failure("negative in a breakpoint", () =>
    client.generate({ ...greedy("less than nothing", 4), cache: { breakpoints } }));
  await failure("negative in a list", () => client.generate({ ...greedy("less than nothing", 4), stopTokenIds: [-3] }));
}

/** Prints how the client refuses values that only JavaScript can put into a number field: name, option, refusal. */
async function refusedNumbers(client: Client): Promise<void> {
  const wrong: [string, Partial<GenerateRequest>][] = [
    ["fraction", { maxTokens: 2.5 }], ["nan", { maxTokens: NaN }], ["large", { maxTokens: 2 ** 32 }],
    ["text", { sampling: { seed: "-1" } }], ["list", { stopTokenIds: [1, -2] }],
    ["token", { prompt: { tokenIds: { ids: [0.5] } } }],
  ];
  for (const [name, options] of wrong) {
    await failure(name, () => client.generate({ ...greedy("numbers", 1), ...options }));
  }
  await failure("deadline that is none", () => client.generate(greedy("numbers", 1), { deadlineMs: NaN }));
  await failure("seed", () => client.generate({ ...greedy("numbers", 1), sampling: { seed: "18446744073709551615" } }));
}

async function scripted(client: Client): Promise<void> {
  await untilAnswered(client);
  let text = "";
  await failure("long", async () => {
    text = (await client.generate(greedy("long", 1))).text;
  });
  fact("long.checksum", await keys.checksum(Buffer.from(text)));
  await failure("rest of context", () => client.generate(greedy("rest of context", 2 ** 32 - 1)));
  await failure("largest top_k", () => client.generate({ ...greedy("top_k", 1), sampling: { topK: -1 } }));
  await stopped(client, "0");
  await stopped(client, "2");
}

/** Leaves a stream at the chunk with this text, when the whole stream has arrived. */
async function stopped(client: Client, last: string): Promise<void> {
  const seen: string[] = [];
  for await (const part of client.stream(greedy("stream", 3))) {
    seen.push(part.text);
    if (part.text !== last) continue;
    await setTimeout(300);
    break;
  }
  fact(`stopped at ${last}.seen`, seen.join(" "));
}

async function untilAnswered(client: Client): Promise<void> {
  for (;;) {
    try {
      await client.generate(greedy("short", 1));
      return;
    } catch (error) {
      if (!(error instanceof KVSidecarError && error.reason === "UNAVAILABLE")) throw error;
    }
    await setTimeout(50);
  }
}

async function vectors(): Promise<void> {
  const bytes = Uint8Array.from({ length: 4096 }, (_, i) => i);
  const [none, salt, tokens] = [new Uint8Array(), Buffer.from("salt"), [1, 2, 3, 70000]];
  const namespace = keys.namespaceId({
    modelFingerprint: bytes.subarray(0, 32), architecture: "Qwen2ForCausalLM", layers: 24, kvHeads: 2, headDim: 64,
    dtype: 3, ropeParameters: '{"rope_theta": 1000000.0}', formatVersion: 2, quantizerVersion: 0, bits: 16,
    loraAdapter: "", tensorParallelRank: 0, tensorParallelSize: 1, producer: "example/1 with \\ and\nnewline",
  });
  const root = keys.tenantRoot(namespace, none);
  const first = keys.prefixHash(root, tokens);
  fact("namespace", hex(namespace));
  fact("root of the empty salt", hex(root));
  fact("root of the salt `salt`", hex(keys.tenantRoot(namespace, salt)));
  fact("tenant id of the empty salt", hex(keys.tenantId(none)));
  fact("tenant id of the salt `salt`", hex(keys.tenantId(salt)));
  fact("prefix_hash of the tokens 1, 2, 3, 70000 under the empty salt's root", hex(first));
  fact("prefix_hash of the token 4294967295 after that", hex(keys.prefixHash(first, [2 ** 32 - 1])));
  fact("content_hash of 1, 2, 3, 70000 under that root", hex(keys.contentHash(root, tokens)));
  fact("head hash of 1, 2, 3, 70000 under that root", hex(keys.headHash(root, tokens)));
  fact("checksum (XXH3-64) of the bytes 0 to 255", await keys.checksum(bytes.subarray(0, 256)));
  for (const n of [0, 1, 3, 4, 8, 9, 16, 17, 64, 128, 129, 240, 241, 1024, 1025, 4096]) {
    fact(`checksum.${n}`, await keys.checksum(bytes.subarray(0, n)));
  }
}

const [target, text] = process.argv.slice(2);
if (target === undefined) {
  await vectors();
} else if (text === undefined) {
  const client = new Client(target);
  await scripted(client);
  client.close();
} else {
  const client = new Client(target);
  await asked(client, text);
  await hinted(client, text);
  await ended(client);
  await refusedNumbers(client);
  client.close();
}
