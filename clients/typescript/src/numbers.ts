import { status } from "@grpc/grpc-js";
import protobuf from "protobufjs";

import { KVSidecarError } from "./errors.js";

// Integer fields that allow negative numbers.
const LEAST: Record<string, number> = { maxTokens: 1, ttlSeconds: 1, retainSeconds: 1 };
const MOST: Record<string, bigint> = { uint32: 2n ** 32n - 1n, uint64: 2n ** 64n - 1n };

/**
 * Refuses numbers that a message's unsigned fields cannot hold: protobufjs would write -3 as 4294967293 and 2.5 as 2.
 * Throws KVSidecarError with the field's name, the value and the allowed values. The worker checks further limits.
 */
export function refuseNumbers(message: object, type: protobuf.Type, within = ""): void {
  for (const [name, value] of Object.entries(message)) {
    const field = Object.hasOwn(type.fields, name) ? type.fields[name]?.resolve() : undefined;
    if (field === undefined || value === undefined || value === null) continue;
    if (field instanceof protobuf.MapField) continue; // its keys are texts here, which the worker judges
    for (const one of field.repeated && Array.isArray(value) ? value : [value]) {
      const most = MOST[field.type];
      if (field.resolvedType instanceof protobuf.Type) {
        if (typeof one === "object" && one !== null) refuseNumbers(one, field.resolvedType, `${within}${name}.`);
      } else if (most !== undefined && !holds(one, most)) {
        const allowed = `whole numbers from ${LEAST[name] ?? 0} to ${most}`;
        const said = typeof one === "string" ? JSON.stringify(one) : String(one);
        throw refusal(`${within}${name} is ${said}; ${allowed} are allowed`);
      }
    }
  }
}

/** An error of the client itself, without a call. */
export function refusal(message: string): KVSidecarError {
  return new KVSidecarError(message, status.INVALID_ARGUMENT, "INVALID_REQUEST", "");
}

// Accepts numbers, strings of digits, and the Long objects of protobufjs.
function holds(value: unknown, most: bigint): boolean {
  if (typeof value === "number") return Number.isInteger(value) && value >= 0 && value < Number(most + 1n);
  const digits = String(value);
  return /^\d+$/.test(digits) && BigInt(digits) <= most;
}
