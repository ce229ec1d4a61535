import { userInfo } from "node:os";
import { join } from "node:path";

import { type ServiceError, status } from "@grpc/grpc-js";

import { KVSidecarError } from "./errors.js";
import { refusal } from "./numbers.js";

const PATIENCE_MS = 1_000;

/** The first worker of `kvsidecar serve`. */
export function defaultTarget(): string {
  const { KVSIDECAR_RUNTIME_DIR: chosen, XDG_RUNTIME_DIR: base } = process.env;
  const folder = chosen || (base ? join(base, "kvsidecar") : `/tmp/kvsidecar-${userInfo().uid}`);
  return `unix:${join(folder, "worker-0.sock")}`;
}

/** Throws KVSidecarError for a URL, which gRPC would look up as a host name. */
export function refuseUrl(target: string): void {
  if (/^https?:/i.test(target)) throw isHttp(target);
}

/** Converts the error of a failed call. If no gRPC server answers at host:port, checks whether an HTTP server does. */
export async function failureAt(target: string, error: ServiceError): Promise<KVSidecarError> {
  const elsewhere = error.code === status.UNAVAILABLE && /^[^/]+:\d+$/.test(target) && !target.startsWith("unix");
  return elsewhere && (await speaksHttp(target)) ? isHttp(target) : KVSidecarError.from(error);
}

async function speaksHttp(target: string): Promise<boolean> {
  try {
    await fetch(`http://${target}/`, { method: "HEAD", redirect: "manual", signal: AbortSignal.timeout(PATIENCE_MS) });
    return true;
  } catch {
    return false;
  }
}

function isHttp(target: string): KVSidecarError {
  return refusal(
    `${target} is an HTTP address, such as the gateway's; give a worker's gRPC: its socket (unix:/PATH) or HOST:PORT`,
  );
}
