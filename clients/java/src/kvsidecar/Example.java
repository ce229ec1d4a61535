package kvsidecar;

import java.time.Duration;
import kvsidecar.inference.v1.Inference.GenerateRequest;
import kvsidecar.inference.v1.Inference.GenerateStreamResponse;

/**
 * Asks a chat question and streams the answer, then asks again: the second time the prompt comes from the cache. Argument:
 * a worker's port.
 */
public final class Example {
    private Example() {}

    public static void main(String[] arguments) {
        int port = arguments.length > 0 ? Integer.parseInt(arguments[0]) : 50051;
        GenerateRequest request = GenerateRequest.newBuilder()
                .setPrompt(Client.chat(Client.message("user", "What is the capital of Germany?")))
                .setMaxTokens(24)
                .build();
        try (Client client = new Client("localhost", port)) {
            client.stream(request, Duration.ofMinutes(1), Example::show);
            client.stream(request, Duration.ofMinutes(1), Example::show);
        } catch (KVSidecarException error) {
            if (error.reason().equals("UNAVAILABLE")) {
                System.err.println("no worker is there; start one with: kvsidecar worker --tcp localhost:" + port);
            }
            System.err.println(error.reason() + ": " + error.getMessage());
            System.exit(1);
        }
    }

    private static boolean show(GenerateStreamResponse part) {
        System.out.print(part.getText());
        System.out.flush();
        if (part.hasUsage()) {
            System.out.printf("%n[%d prompt tokens, %d from the cache]%n",
                    part.getUsage().getPromptTokens(), part.getUsage().getCachedTokens());
        }
        return true; // false would cancel
    }
}
