import { type ServiceError, status } from "@grpc/grpc-js";
import protobuf from "protobufjs";

// The fields of google.rpc.Status and ErrorInfo (https://google.aip.dev/193) that this client uses.
const rpc = protobuf.Root.fromJSON({
  nested: {
    Status: { fields: { details: { rule: "repeated", type: "Any", id: 3 } } },
    Any: { fields: { typeUrl: { type: "string", id: 1 }, value: { type: "bytes", id: 2 } } },
    ErrorInfo: { fields: { reason: { type: "string", id: 1 }, domain: { type: "string", id: 2 } } },
  },
});
const Status = rpc.lookupType("Status");
const ErrorInfo = rpc.lookupType("ErrorInfo");

// An error without details comes from gRPC on either side, not from the worker.
const REASONS: Partial<Record<status, string>> = {
  [status.CANCELLED]: "CANCELLED",
  [status.DEADLINE_EXCEEDED]: "DEADLINE_EXCEEDED",
  [status.UNAVAILABLE]: "UNAVAILABLE",
  [status.INVALID_ARGUMENT]: "INVALID_REQUEST",
};

/**
 * A call that failed. `reason` is stable and meant for programs, such as "INVALID_REQUEST" or "OVERLOADED"
 * (clients/python/kvsidecar/errors has all reasons). `message` is one sentence for people.
 */
export class KVSidecarError extends Error {
  constructor(
    message: string,
    readonly code: status,
    readonly reason: string,
    readonly domain: string,
  ) {
    super(message);
    this.name = "KVSidecarError";
  }

  /** Converts the error of a failed call. */
  static from(error: ServiceError): KVSidecarError {
    let [reason, domain] = [REASONS[error.code] ?? "INTERNAL", ""];
    for (const packed of error.metadata?.get("grpc-status-details-bin") ?? []) {
      const { details } = Status.decode(packed as Buffer) as unknown as {
        details: { typeUrl: string; value: Uint8Array }[];
      };
      for (const detail of details) {
        if (detail.typeUrl === "type.googleapis.com/google.rpc.ErrorInfo") {
          ({ reason, domain } = ErrorInfo.decode(detail.value) as unknown as { reason: string; domain: string });
        }
      }
    }
    return new KVSidecarError(error.details, error.code, reason, domain);
  }
}
