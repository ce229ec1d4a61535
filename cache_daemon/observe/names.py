"""The metrics and what they mean: fields of StatsResponse. docs/operations.md says when to worry."""

from __future__ import annotations

GAUGES = {
    "uptime_seconds": "Seconds since the start",
    "sessions": "Sessions attached",
    "chunks": "Chunks stored",
    "tokens": "Tokens in stored chunks",
    "arena_bytes": "Size of the arena",
    "arena_used_bytes": "Arena bytes in use",
    "arena_chunks": "Chunks in the arena",
    "durable_budget_bytes": "Budget of the durable tier",
    "durable_bytes": "Bytes in use in the durable tier",
    "durable_file_bytes": "Size of the durable tier's file",
    "durable_chunks": "Chunks in the durable tier",
    "leases": "Read leases held",
    "reservations": "Reservations open",
    "pending_writes": "Chunks waiting to be written to the durable tier",
    "pinned_bytes": "Payload bytes of pinned chunks",
    "loop_stall_ms": "Longest stall of the event loop in the last minute, in milliseconds",
}
COUNTERS = {
    "prompts": "Prompts that workers served",
    "prompt_tokens": "Tokens of these prompts",
    "cached_tokens": "Tokens of these prompts that were not computed anew",
    "pool_tokens": "Of the cached tokens, those that were in a worker's own pool",
    "matches": "Match calls, and prompts that needed none",
    "requested_tokens": "Tokens asked for in them",
    "matched_tokens": "Tokens found in them",
    "content_tokens": "Tokens found by content, beyond the prefix",
    "promoted_tokens": "Tokens brought in from the durable tier",
    "commits": "Chunks committed",
    "arena_evictions": "Chunks dropped from the arena to make room",
    "durable_evictions": "Chunks dropped from the durable tier to make room",
    "expired_chunks": "Chunks whose time to live had passed",
    "corrupt_chunks": "Chunks whose checksum, header or length did not hold",
    "failed_writes": "Chunks that could not be made durable at the first try",
    "refused": "Requests that a limit or a quota refused",
}
