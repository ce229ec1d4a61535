package kvsidecar;

import com.google.protobuf.ByteString;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.locks.LockSupport;
import kvsidecar.cache.v1.Chunk.DataType;
import kvsidecar.cache.v1.Chunk.NamespaceDescriptor;
import kvsidecar.inference.v1.Inference.CacheBreakpoint;
import kvsidecar.inference.v1.Inference.CacheOptions;
import kvsidecar.inference.v1.Inference.CachePriority;
import kvsidecar.inference.v1.Inference.GenerateRequest;
import kvsidecar.inference.v1.Inference.GenerateResponse;
import kvsidecar.inference.v1.Inference.Prompt;
import kvsidecar.inference.v1.Inference.Sampling;

/**
 * Prints this client's view of a worker, one fact per line, for tests/clients: PORT TEXT. Without a TEXT it prints its
 * view of tests/clients/scripted_worker.py; without arguments the hashes of docs/protocol.md's test vectors, and
 * checksums by length.
 */
public final class Facts {
    private static final int MOST = 400;
    private static final Duration LONG = Duration.ofMinutes(1);

    private Facts() {}

    public static void main(String[] arguments) throws InterruptedException {
        if (arguments.length == 0) {
            vectors();
            return;
        }
        try (Client client = new Client("localhost", Integer.parseInt(arguments[0]))) {
            if (arguments.length == 1) {
                scripted(client);
                return;
            }
            asked(client, arguments[1]);
            hinted(client, arguments[1]);
            ended(client);
        }
    }

    private static void fact(String name, Object value) {
        System.out.println(name + "\t" + value);
    }

    private static String hex(String text) {
        return Keys.hex(text.getBytes(StandardCharsets.UTF_8));
    }

    private static GenerateRequest greedy(String text, int most) {
        return GenerateRequest.newBuilder().setPrompt(Client.text(text)).setMaxTokens(most)
                .setSampling(Sampling.newBuilder().setTemperature(0)).setIgnoreEos(true).build();
    }

    private static void asked(Client client, String text) {
        fact("warm.stored_tokens", client.warm(Client.text(text), LONG).getStoredTokens());
        GenerateResponse whole = client.generate(greedy(text, 12), LONG);
        fact("generate.text", hex(whole.getText()));
        fact("generate.prompt_tokens", whole.getUsage().getPromptTokens());
        fact("generate.cached_tokens", whole.getUsage().getCachedTokens());
        StringBuilder streamed = new StringBuilder();
        int[] pieces = {0};
        client.stream(greedy(text, 12), LONG, part -> {
            streamed.append(part.getText());
            pieces[0]++;
            if (part.hasUsage()) {
                fact("stream.generated_tokens", part.getUsage().getGeneratedTokens());
            }
            return true;
        });
        fact("stream.text", hex(streamed.toString()));
        fact("stream.pieces", pieces[0]);
        GenerateRequest question = greedy("", 8).toBuilder().setPrompt(Client.chat(Client.message("user", text)))
                .setExplain(true).build();
        GenerateResponse answer = client.generate(question, LONG);
        fact("chat.text", hex(answer.getText()));
        fact("chat.reasoning", hex(answer.getReasoning()));
        fact("chat.miss", answer.getMiss().getKind());
    }

    private static void hinted(Client client, String text) {
        Prompt own = Client.text("An agent's own notes: " + text);
        CacheOptions cache = CacheOptions.newBuilder().setSession("agent").setRetainSeconds(60)
                .addBreakpoints(CacheBreakpoint.newBuilder().setTokens(64).setRetainSeconds(300))
                .setPriority(CachePriority.CACHE_PRIORITY_LOW).build();
        client.warm(own, cache, LONG);
        fact("prefetch.stored_tokens", client.prefetch(Client.text(text), LONG).getStoredTokens());
        fact("session.released_chunks", client.releaseSession("agent", ByteString.EMPTY, LONG));
        failure("no retention", () -> client.warm(own, cache.toBuilder().setRetainSeconds(0).build(), LONG));
    }

    private static void ended(Client client) {
        failure("cancel", () -> client.stream(greedy("cancelled after its first piece", MOST), LONG, part -> false));
        Duration moment = Duration.ofMillis(50);
        failure("deadline", () -> client.generate(greedy("more than can be said in a moment", MOST), moment));
        failure("refused", () -> client.generate(greedy("nothing may be asked for", 0), LONG));
        failure("negative", () -> client.generate(greedy("less than nothing", -3), LONG));
        GenerateRequest request = greedy("less than nothing", 4).toBuilder()
                .setSampling(Sampling.newBuilder().setTopK(-3)).build();
        failure("negative in a stream", () -> client.stream(request, LONG, part -> true));
        CacheOptions.Builder cache = CacheOptions.newBuilder()
                .addBreakpoints(CacheBreakpoint.newBuilder().setTokens(-3));
        GenerateRequest point = greedy("less than nothing", 4).toBuilder().setCache(cache).build();
        failure("negative in a breakpoint", () -> client.generate(point, LONG));
        GenerateRequest list = greedy("less than nothing", 4).toBuilder().addStopTokenIds(-3).build();
        failure("negative in a list", () -> client.generate(list, LONG));
    }

    private static void scripted(Client client) throws InterruptedException {
        untilAnswered(client);
        StringBuilder text = new StringBuilder();
        failure("long", () -> text.append(client.generate(greedy("long", 1), LONG).getText()));
        fact("long.checksum", hex(XXH3.hash(text.toString().getBytes(StandardCharsets.UTF_8))));
        failure("rest of context", () -> client.generate(greedy("rest of context", -1), LONG));
        GenerateRequest request = greedy("top_k", 1).toBuilder().setSampling(Sampling.newBuilder().setTopK(-1)).build();
        failure("largest top_k", () -> client.generate(request, LONG));
        stopped(client, "0");
        stopped(client, "2");
    }

    /** Ends a stream at the chunk with this text, when the whole stream has arrived. */
    private static void stopped(Client client, String last) {
        List<String> seen = new ArrayList<>();
        failure("stopped at " + last, () -> client.stream(greedy("stream", 3), LONG, part -> {
            seen.add(part.getText());
            if (part.getText().equals(last)) {
                LockSupport.parkNanos(Duration.ofMillis(300).toNanos());
            }
            return !part.getText().equals(last);
        }));
        fact("stopped at " + last + ".seen", String.join(" ", seen));
    }

    private static void untilAnswered(Client client) throws InterruptedException {
        while (true) {
            try {
                client.generate(greedy("short", 1), LONG);
                return;
            } catch (KVSidecarException error) {
                if (!error.reason().equals("UNAVAILABLE")) {
                    throw error;
                }
            }
            Thread.sleep(50);
        }
    }

    private static void failure(String name, Runnable call) {
        try {
            call.run();
            fact(name + ".reason", "none");
        } catch (KVSidecarException error) {
            fact(name + ".reason", error.reason());
            fact(name + ".code", error.code().value());
            fact(name + ".message", error.getMessage());
            fact(name + ".domain", error.domain());
        }
    }

    private static void vectors() {
        byte[] bytes = new byte[4096];
        for (int i = 0; i < bytes.length; i++) {
            bytes[i] = (byte) i;
        }
        byte[] none = {};
        byte[] salt = "salt".getBytes(StandardCharsets.US_ASCII);
        byte[] namespace = Keys.namespaceId(NamespaceDescriptor.newBuilder()
                .setModelFingerprint(ByteString.copyFrom(bytes, 0, 32)).setArchitecture("Qwen2ForCausalLM").setLayers(24)
                .setKvHeads(2).setHeadDim(64).setDtype(DataType.DATA_TYPE_BFLOAT16)
                .setRopeParameters("{\"rope_theta\": 1000000.0}").setFormatVersion(2).setBits(16).setTensorParallelSize(1)
                .setProducer("example/1 with \\ and\nnewline").build());
        byte[] root = Keys.tenantRoot(namespace, none);
        byte[] first = Keys.prefixHash(root, 1, 2, 3, 70000);
        fact("namespace", Keys.hex(namespace));
        fact("root of the empty salt", Keys.hex(root));
        fact("root of the salt `salt`", Keys.hex(Keys.tenantRoot(namespace, salt)));
        fact("tenant id of the empty salt", Keys.hex(Keys.tenantId(none)));
        fact("tenant id of the salt `salt`", Keys.hex(Keys.tenantId(salt)));
        fact("prefix_hash of the tokens 1, 2, 3, 70000 under the empty salt's root", Keys.hex(first));
        fact("prefix_hash of the token 4294967295 after that", Keys.hex(Keys.prefixHash(first, -1)));
        fact("content_hash of 1, 2, 3, 70000 under that root", Keys.hex(Keys.contentHash(root, 1, 2, 3, 70000)));
        fact("head hash of 1, 2, 3, 70000 under that root", Keys.hex(Keys.headHash(root, 1, 2, 3, 70000)));
        fact("checksum (XXH3-64) of the bytes 0 to 255", hex(XXH3.hash(Arrays.copyOf(bytes, 256))));
        for (int n : new int[] {0, 1, 3, 4, 8, 9, 16, 17, 64, 128, 129, 240, 241, 1024, 1025, 4096}) {
            fact("checksum." + n, hex(XXH3.hash(Arrays.copyOf(bytes, n))));
        }
    }

    private static String hex(long value) {
        return String.format("%016x", value);
    }
}
