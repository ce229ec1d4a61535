// Keys of the cache. The specification is protos/kvsidecar/cache/v1/chunk.proto.
import { createHash } from "node:crypto";

import { xxhash3 } from "hash-wasm";

/** Everything that determines a chunk's bytes: kvsidecar.cache.v1.NamespaceDescriptor in camel case, `dtype` as a
   number. */
export interface NamespaceDescriptor {
  modelFingerprint: Uint8Array;
  architecture: string;
  layers: number;
  kvHeads: number;
  headDim: number;
  dtype: number;
  ropeParameters: string;
  formatVersion: number;
  quantizerVersion: number;
  bits: number;
  loraAdapter: string;
  tensorParallelRank: number;
  tensorParallelSize: number;
  producer: string;
}

/** Hash input of a namespace id: one line per field, in the order of field numbers. */
export function canonicalEncoding(d: NamespaceDescriptor): string {
  const escaped = (text: string) => text.replaceAll("\\", "\\\\").replaceAll("\n", "\\n");
  const fields: [string, string | number][] = [
    ["model_fingerprint", Buffer.from(d.modelFingerprint).toString("hex")],
    ["architecture", escaped(d.architecture)],
    ["layers", d.layers],
    ["kv_heads", d.kvHeads],
    ["head_dim", d.headDim],
    ["dtype", d.dtype],
    ["rope_parameters", escaped(d.ropeParameters)],
    ["format_version", d.formatVersion],
    ["quantizer_version", d.quantizerVersion],
    ["bits", d.bits],
    ["lora_adapter", escaped(d.loraAdapter)],
    ["tensor_parallel_rank", d.tensorParallelRank],
    ["tensor_parallel_size", d.tensorParallelSize],
    ["producer", escaped(d.producer)],
  ];
  return fields.map(([name, value]) => `${name}=${value}\n`).join("");
}

/** Id of everything that determines a chunk's bytes. */
export const namespaceId = (d: NamespaceDescriptor) => hashed("namespace", sized(Buffer.from(canonicalEncoding(d))));

/** The root of a tenant's chunks in a namespace. */
export const tenantRoot = (namespace: Uint8Array, salt: Uint8Array) => hashed("root", namespace, sized(salt));

/** Id of a tenant across namespaces. */
export const tenantId = (salt: Uint8Array) => hashed("tenant", sized(salt));

/** Id of a chunk together with its whole prefix; the first chunk's parent is the tenant root. */
export const prefixHash = (parent: Uint8Array, tokens: number[]) => hashed("prefix", parent, counted(tokens));

/** Id of a chunk's tokens, independent of their position. */
export const contentHash = (root: Uint8Array, tokens: number[]) => hashed("content", root, counted(tokens));

/** Key of a prompt's first tokens in the index summary. */
export const headHash = (root: Uint8Array, tokens: number[]) => hashed("head", root, counted(tokens));

/** XXH3-64 of a payload, as 16 hexadecimal digits. */
export const checksum = (payload: Uint8Array): Promise<string> => xxhash3(payload);

function hashed(purpose: string, ...parts: Uint8Array[]): Buffer {
  const digest = createHash("sha256").update(`kvsidecar/2/${purpose}`);
  for (const part of parts) digest.update(part);
  return digest.digest();
}

const sized = (part: Uint8Array) => Buffer.concat([Buffer.from(Uint32Array.of(part.length).buffer), part]);

/** Typed arrays are little-endian on all platforms of Node. */
const counted = (tokens: number[]) => Buffer.from(Uint32Array.of(tokens.length, ...tokens).buffer);
