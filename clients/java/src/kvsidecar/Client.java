package kvsidecar;

import com.google.protobuf.ByteString;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.time.Duration;
import java.util.Iterator;
import java.util.concurrent.CancellationException;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;
import java.util.function.Predicate;
import kvsidecar.inference.v1.Inference.CacheOptions;
import kvsidecar.inference.v1.Inference.Chat;
import kvsidecar.inference.v1.Inference.ChatMessage;
import kvsidecar.inference.v1.Inference.GenerateRequest;
import kvsidecar.inference.v1.Inference.GenerateResponse;
import kvsidecar.inference.v1.Inference.GenerateStreamRequest;
import kvsidecar.inference.v1.Inference.GenerateStreamResponse;
import kvsidecar.inference.v1.Inference.Prompt;
import kvsidecar.inference.v1.Inference.ReleaseSessionRequest;
import kvsidecar.inference.v1.Inference.WarmRequest;
import kvsidecar.inference.v1.Inference.WarmResponse;
import kvsidecar.inference.v1.InferenceServiceGrpc;
import kvsidecar.inference.v1.InferenceServiceGrpc.InferenceServiceBlockingStub;

/**
 * A client of an inference worker. Requests and answers are the generated messages of kvsidecar.inference.v1, whose
 * fields document units and defaults. Failed calls throw {@link KVSidecarException}. Safe for use by many threads.
 *
 * <p>A call made in an {@link io.grpc.Context} ends when the context is cancelled, and the worker frees the request's
   memory.
 */
public final class Client implements AutoCloseable {
    /** A long answer with logprobs exceeds gRPC's default of 4 MiB. */
    private static final int MAX_RECEIVE_BYTES = 64 << 20;
    /** As max_tokens: an answer may fill the rest of the context. It is the unsigned number 4294967295. */
    public static final int REST_OF_CONTEXT = -1;

    private final ManagedChannel channel;
    private final InferenceServiceBlockingStub stub;

    /** A worker's TCP address (`kvsidecar worker --tcp`), since gRPC for Java has no Unix sockets without native libraries. */
    public Client(String host, int port) {
        // Keepalive: detects a dead worker within 40 s while a call is open. The worker limits the ping rate.
        this(ManagedChannelBuilder.forAddress(host, port).usePlaintext()
                .keepAliveTime(30, TimeUnit.SECONDS).keepAliveTimeout(10, TimeUnit.SECONDS)
                .maxInboundMessageSize(MAX_RECEIVE_BYTES).build());
    }

    /** Takes ownership of the channel, and closes it with the client. */
    public Client(ManagedChannel channel) {
        this.channel = channel;
        this.stub = InferenceServiceGrpc.newBlockingStub(channel);
    }

    /** Every method of the service, for methods that this class does not wrap. */
    public InferenceServiceBlockingStub stub() {
        return stub;
    }

    /** Returns the complete answer. */
    public GenerateResponse generate(GenerateRequest request, Duration deadline) {
        Numbers.refuseNegative(request);
        return call(deadline, stub -> stub.generate(request));
    }

    /**
     * Calls {@code each} with every chunk; the last chunk has finish_reason, usage and timings. When {@code each}
     * returns false or throws, the request ends at the worker, and {@code each} is not called again.
     *
     * @throws KVSidecarException with reason CANCELLED when {@code each} returned false
     */
    public void stream(GenerateRequest request, Duration deadline, Predicate<GenerateStreamResponse> each) {
        Numbers.refuseNegative(request);
        GenerateStreamRequest wrapped = GenerateStreamRequest.newBuilder().setRequest(request).build();
        try (Context.CancellableContext context = Context.current().withCancellation()) {
            context.run(() -> call(deadline, stub -> {
                Iterator<GenerateStreamResponse> parts = stub.generateStream(wrapped);
                while (parts.hasNext()) {
                    if (!each.test(parts.next())) {
                        context.cancel(new CancellationException("the caller has enough"));
                        // The call itself may have ended well: its last chunks and status arrive before they are read.
                        throw Status.CANCELLED.withDescription("the caller has enough").asRuntimeException();
                    }
                }
                return null;
            }));
        }
    }

    /** Prefills a prompt into the cache, and returns when the daemon has stored it. */
    public WarmResponse warm(Prompt prompt, Duration deadline) {
        return warm(WarmRequest.newBuilder().setPrompt(prompt).build(), deadline);
    }

    /** Prefills a prompt with hints for the cache, such as a session or a retention. */
    public WarmResponse warm(Prompt prompt, CacheOptions cache, Duration deadline) {
        return warm(WarmRequest.newBuilder().setPrompt(prompt).setCache(cache).build(), deadline);
    }

    /** Loads stored chunks of a prompt into the daemon's memory, without computing. */
    public WarmResponse prefetch(Prompt prompt, Duration deadline) {
        return warm(WarmRequest.newBuilder().setPrompt(prompt).setPrefetch(true).build(), deadline);
    }

    /** Removes the chunks that only this session of the tenant has used. Returns their number. */
    public int releaseSession(String session, ByteString tenantSalt, Duration deadline) {
        ReleaseSessionRequest request =
                ReleaseSessionRequest.newBuilder().setSession(session).setTenantSalt(tenantSalt).build();
        return call(deadline, stub -> stub.releaseSession(request)).getReleasedChunks();
    }

    private WarmResponse warm(WarmRequest request, Duration deadline) {
        Numbers.refuseNegative(request);
        return call(deadline, stub -> stub.warm(request));
    }

    /** Ends all calls. */
    @Override
    public void close() {
        channel.shutdownNow();
    }

    /** Plain text without a chat template: a chat model continues it instead of answering it. */
    public static Prompt text(String text) {
        return Prompt.newBuilder().setText(text).build();
    }

    /** A conversation, rendered with the model's template. */
    public static Prompt chat(ChatMessage... messages) {
        Chat.Builder chat = Chat.newBuilder();
        for (ChatMessage message : messages) {
            chat.addMessages(message);
        }
        return Prompt.newBuilder().setChat(chat).build();
    }

    /** A message of a conversation: a role ("system", "user", "assistant") and its text. */
    public static ChatMessage message(String role, String content) {
        return ChatMessage.newBuilder().setRole(role).setContent(content).build();
    }

    private <T> T call(Duration deadline, Function<InferenceServiceBlockingStub, T> method) {
        // Finds a worker that was away: gRPC waits up to two minutes between attempts, and has no setting for Java.
        channel.resetConnectBackoff();
        try {
            return method.apply(stub.withDeadlineAfter(deadline.toNanos(), TimeUnit.NANOSECONDS));
        } catch (StatusRuntimeException error) {
            throw KVSidecarException.at(channel.authority(), error);
        }
    }
}
