export { Client, defaultTarget, type CallOptions } from "./client.js";
export { KVSidecarError } from "./errors.js";
export * from "./keys.js";
export type { GenerateRequest } from "../gen/kvsidecar/inference/v1/GenerateRequest.js";
export type { GenerateResponse__Output as GenerateResponse } from "../gen/kvsidecar/inference/v1/GenerateResponse.js";
export type { GenerateStreamResponse__Output as GenerateStreamResponse } from "../gen/kvsidecar/inference/v1/GenerateStreamResponse.js";
export type { Prompt } from "../gen/kvsidecar/inference/v1/Prompt.js";
export type { WarmResponse__Output as WarmResponse } from "../gen/kvsidecar/inference/v1/WarmResponse.js";
