import { fileURLToPath } from "node:url";

import * as grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import protobuf from "protobufjs";

import type { ProtoGrpcType } from "../gen/inference.js";
import type { CacheOptions } from "../gen/kvsidecar/inference/v1/CacheOptions.js";
import type { GenerateRequest } from "../gen/kvsidecar/inference/v1/GenerateRequest.js";
import type { GenerateResponse__Output } from "../gen/kvsidecar/inference/v1/GenerateResponse.js";
import type { GenerateStreamResponse__Output } from "../gen/kvsidecar/inference/v1/GenerateStreamResponse.js";
import type { InferenceServiceClient } from "../gen/kvsidecar/inference/v1/InferenceService.js";
import type { Prompt } from "../gen/kvsidecar/inference/v1/Prompt.js";
import type { ReleaseSessionResponse__Output } from "../gen/kvsidecar/inference/v1/ReleaseSessionResponse.js";
import type { WarmResponse__Output } from "../gen/kvsidecar/inference/v1/WarmResponse.js";
import { defaultTarget, failureAt, refuseUrl } from "./addresses.js";
import { refusal, refuseNumbers } from "./numbers.js";

/** Options that end a call early. */
export interface CallOptions {
  /** Aborting the signal ends the request at the worker, which frees the request's memory. */
  signal?: AbortSignal;
  /** The call fails with DEADLINE_EXCEEDED after this time; without it, there is no limit. */
  deadlineMs?: number;
}

const CHANNEL: grpc.ChannelOptions = {
  // Keepalive: detects a dead worker within 40 s while a call is open. The worker limits the ping rate.
  "grpc.keepalive_time_ms": 30_000,
  "grpc.keepalive_timeout_ms": 10_000,
  // Finds a worker that was away within a second; by default, gRPC waits up to two minutes between attempts.
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 1_000,
  // A long answer with logprobs exceeds gRPC's default of 4 MiB.
  "grpc.max_receive_message_length": 64 << 20,
};

const PROTO = fileURLToPath(new URL("../protos/inference/v1/inference.proto", import.meta.url));

/**
 * A client of an inference worker. Requests and answers are the messages of kvsidecar.inference.v1 in camel case, whose
 * fields document units and defaults. Failed calls throw KVSidecarError. Close it after use.
 */
export class Client {
  /** Every method of the service, for methods that this class does not wrap. */
  readonly stub: InferenceServiceClient;
  private readonly request: protobuf.Type;

  /** "unix:/PATH" or "host:port". Connects at first use. Throws KVSidecarError for the URL of a gateway. */
  constructor(private readonly target = defaultTarget(), credentials = grpc.credentials.createInsecure()) {
    refuseUrl(target);
    this.request = protobuf.loadSync(PROTO).lookupType("kvsidecar.inference.v1.GenerateRequest");
    const definition = loadSync(PROTO, {
      longs: Number,
      enums: String,
      defaults: true,
      oneofs: true,
    });
    const api = grpc.loadPackageDefinition(definition) as unknown as ProtoGrpcType;
    this.stub = new api.kvsidecar.inference.v1.InferenceService(target, credentials, CHANNEL);
  }

  close(): void {
    this.stub.close();
  }

  /** Returns the complete answer. */
  generate(request: GenerateRequest, options: CallOptions = {}): Promise<GenerateResponse__Output> {
    return this.unary(options, (callOptions, done) => {
      refuseNumbers(request, this.request);
      return this.stub.generate(request, callOptions, done);
    });
  }

  /** Yields every chunk; the last chunk has finishReason, usage and timings. Leaving the loop cancels the request. */
  async *stream(request: GenerateRequest, options: CallOptions = {}): AsyncGenerator<GenerateStreamResponse__Output> {
    refuseNumbers(request, this.request);
    const call = this.stub.generateStream({ request }, deadlineOf(options));
    const cancel = () => call.cancel();
    options.signal?.addEventListener("abort", cancel);
    if (options.signal?.aborted) cancel();
    try {
      for await (const part of call) yield part as GenerateStreamResponse__Output;
    } catch (error) {
      throw await failureAt(this.target, error as grpc.ServiceError);
    } finally {
      options.signal?.removeEventListener("abort", cancel);
      call.cancel();
    }
  }

  /** Prefills a prompt into the cache, and returns when the daemon has stored it; `cache` has hints, such as a session. */
  warm(prompt: Prompt, options: CallOptions = {}, cache: CacheOptions = {}): Promise<WarmResponse__Output> {
    return this.unary(options, (callOptions, done) => {
      refuseNumbers({ prompt, cache }, this.request);
      return this.stub.warm({ prompt, cache }, callOptions, done);
    });
  }

  /** Loads stored chunks of a prompt into the daemon's memory, without computing. */
  prefetch(prompt: Prompt, options: CallOptions = {}): Promise<WarmResponse__Output> {
    return this.unary(options, (callOptions, done) => {
      refuseNumbers({ prompt }, this.request);
      return this.stub.warm({ prompt, prefetch: true }, callOptions, done);
    });
  }

  /** Removes the chunks that only this session of the tenant has used. Returns their number. */
  async releaseSession(session: string, tenantSalt = new Uint8Array(), options: CallOptions = {}): Promise<number> {
    const released = await this.unary<ReleaseSessionResponse__Output>(options, (callOptions, done) =>
      this.stub.releaseSession({ session, tenantSalt: Buffer.from(tenantSalt) }, callOptions, done),
    );
    return released.releasedChunks;
  }

  private unary<T>(
    options: CallOptions,
    start: (callOptions: grpc.CallOptions, done: grpc.requestCallback<T>) => grpc.ClientUnaryCall,
  ): Promise<T> {
    return new Promise((resolve, reject) => {
      const call = start(deadlineOf(options), (error, response) => {
        options.signal?.removeEventListener("abort", cancel);
        if (error) failureAt(this.target, error).then(reject, reject);
        else resolve(response as T);
      });
      const cancel = () => call.cancel();
      options.signal?.addEventListener("abort", cancel);
      if (options.signal?.aborted) cancel();
    });
  }
}

function deadlineOf({ deadlineMs }: CallOptions): grpc.CallOptions {
  if (deadlineMs === undefined) return {};
  if (!(deadlineMs >= 0)) throw refusal(`deadlineMs is ${deadlineMs}; milliseconds from 0 on are allowed`);
  return { deadline: Date.now() + deadlineMs };
}
