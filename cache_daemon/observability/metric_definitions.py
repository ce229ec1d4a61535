"""Metric names and help texts for the fields of StatsResponse.

docs/operations/monitoring.md says when to act.
"""

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
    "remote_pending": "Chunks waiting to be written to the remote tier",
    "remote_deletions": "Deletions not yet applied to the remote tier",
    "remote_refilling_tenants": "Tenants whose chunks are to be written again to a remote tier that lost its data",
    "remote_latency_ms": "Latency of a small read of the remote tier, in milliseconds",
    "remote_bytes_per_second": "Measured read throughput of the remote tier, in bytes per second",
    "loop_stall_ms": "Longest stall of the event loop in the last minute, in milliseconds",
}
SECONDS = {"loop_stall_ms": "loop_stall_seconds", "remote_latency_ms": "remote_latency_seconds"}
"""Gauges in milliseconds, which Prometheus also gets in seconds: the names in ``_ms`` stay for one version."""
COUNTERS = {
    "prompts": "Prompts that workers served, except those that bypass the cache",
    "prompt_tokens": "Tokens of these prompts",
    "cached_tokens": "Tokens of these prompts that were loaded, not computed",
    "pool_tokens": "Cached tokens that came from a worker's own pool",
    "matches": "Lookups: Match calls, and prompts that needed none",
    "requested_tokens": "Prompt tokens of these lookups",
    "matched_tokens": "Tokens matched by these lookups",
    "content_tokens": "Tokens matched by content, beyond the prefix",
    "promoted_tokens": "Tokens promoted from the durable tier",
    "commits": "Chunks committed",
    "arena_evictions": "Chunks evicted from the arena",
    "durable_evictions": "Chunks evicted from the durable tier",
    "expired_chunks": "Chunks removed because their TTL expired",
    "corrupt_chunks": "Chunks with a wrong checksum, header or length",
    "failed_writes": "Chunks that could not be made durable at the first try",
    "failed_reads": "Reads of durable chunks that the disk failed",
    "remote_lookups": "Prompts looked up in the remote tier",
    "remote_hits": "Prompts with tokens from the remote tier",
    "remote_tokens": "Tokens fetched from the remote tier",
    "remote_bypassed": "Prompts that were faster to compute than to fetch from the remote tier",
    "remote_late": "Prompts whose chunks could have been computed before the remote tier sent them",
    "remote_read_bytes": "Payload bytes read from the remote tier",
    "remote_written_bytes": "Payload bytes written to the remote tier",
    "remote_written_chunks": "Chunks written to the remote tier",
    "remote_dropped": "Chunks not written to the remote tier because the queue or the arena was full",
    "remote_withheld": "Chunks withheld from a remote tier that had just lost its data",
    "remote_restored_deletions": "Deletions repeated in a remote tier that had lost them",
    "remote_data_losses": "Times that the remote tier had lost its data",
    "remote_failures": "Calls to the remote tier that failed or timed out",
    "remote_rejected": "Invalid values read from the remote tier",
    "remote_hedged": "Hedged reads: reads sent to the remote tier a second time",
    "remote_opened": "Times that the circuit breaker of the remote tier opened",
    "restarts": "Times that the daemon was started again because it died",
    "oom_kills": "Times that the kernel killed the daemon for memory",
    "refused": "Requests refused by a limit or a quota",
}
