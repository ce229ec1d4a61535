"""The panels of the dashboard: what somebody on call looks at first, row by row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """A graph. ``queries`` are legends with what they show; ``unit`` is Grafana's name of it."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    text: str = ""


def rate(metric: str, by: str = "") -> str:
    """A counter's rate, summed over all processes, or over all with the same label."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}[$__rate_interval]))"


def share(part: str, whole: str) -> str:
    """Of two counters' rates; nothing while the whole stands still."""
    return f"{rate(part)} / ({rate(whole)} > 0)"


def quantile(q: float, histogram: str) -> str:
    return f"histogram_quantile({q}, sum by (le) (rate({histogram}_bucket[$__rate_interval])))"


PROMPT = "kvsidecar_cache_prompt_tokens_total"
FIRST = "vllm:time_to_first_token_seconds"
FIRST_OF_FLEET = "kvsidecar_gateway_ttft_seconds"

ROWS: dict[str, tuple[Panel, ...]] = {
    "What reuse gives": (
        Panel("Prompt tokens that were not computed", "percentunit",
              (("all", share("kvsidecar_cache_cached_tokens_total", PROMPT)),
               ("workers' own pools", share("kvsidecar_cache_pool_tokens_total", PROMPT)),
               ("found by the daemon", share("kvsidecar_cache_matched_tokens_total", PROMPT)),
               ("from disk", share("kvsidecar_cache_promoted_tokens_total", PROMPT)),
               ("in another context", share("kvsidecar_cache_content_tokens_total", PROMPT))),
              "Falls while the traffic stays what it was: see the runbook, hit ratio."),
        Panel("Time to first token", "s", tuple((f"p{round(q * 100)}", quantile(q, FIRST)) for q in (0.5, 0.95, 0.99))),
        Panel("Time to first token, of a fleet", "s",
              tuple((f"p{round(q * 100)}", quantile(q, FIRST_OF_FLEET)) for q in (0.5, 0.95, 0.99))),
        Panel("Tokens per second", "short",
              (("prompt", rate("kvsidecar_worker_prompt_tokens_total")),
               ("of these cached", rate("kvsidecar_worker_cached_tokens_total")),
               ("generated", rate("kvsidecar_worker_generated_tokens_total")))),
    ),
    "Load": (
        Panel("Requests in the batch", "short", (("{{instance}}", "kvsidecar_worker_running"),)),
        Panel("Requests that wait", "short", (("{{instance}}", "kvsidecar_worker_waiting"),),
              "What the autoscaler goes by."),
        Panel("Workers that answer", "short", (("{{instance}}", "kvsidecar_gateway_workers_up"),)),
        Panel("Nodes of a fleet", "short",
              (("{{instance}}: named", "kvsidecar_gateway_nodes"), ("{{instance}}: up", "kvsidecar_gateway_nodes_up"))),
        Panel("Time to ask a fleet's nodes", "s",
              tuple((f"p{round(q * 100)}", quantile(q, "kvsidecar_gateway_asking_seconds")) for q in (0.5, 0.99))),
        Panel("Answers by code", "reqps", (("{{code}}", rate("kvsidecar_gateway_requests_total", "code")),)),
        Panel("Free pages of the pool", "percentunit",
              (("{{instance}}", "kvsidecar_worker_pool_free_pages / kvsidecar_worker_pool_pages"),)),
        Panel("Contexts that the pool does not hold", "percentunit",
              (("{{instance}}: pages taken",
                "1 - kvsidecar_worker_overflow_free_pages / (kvsidecar_worker_overflow_pages > 0)"),),
              "Full: long prompts are refused until one of them ends."),
        Panel("Preemptions, retries, cancelled", "cps",
              (("preemptions", rate("kvsidecar_worker_preemptions_total")),
               ("contexts beyond the pool", rate("kvsidecar_worker_overflowed_total")),
               ("second workers", rate("kvsidecar_gateway_retries_total")),
               ("cancelled", rate("kvsidecar_worker_cancelled_total")))),
    ),
    "The cache": (
        Panel("Arena in use", "percentunit",
              (("{{instance}}", "kvsidecar_cache_arena_used_bytes / kvsidecar_cache_arena_bytes"),), "Full is normal."),
        Panel("Disk", "bytes",
              (("chunks", "sum(kvsidecar_cache_durable_bytes)"), ("file", "sum(kvsidecar_cache_durable_file_bytes)"),
               ("budget", "sum(kvsidecar_cache_durable_budget_bytes)"))),
        Panel("Chunks that go", "cps",
              (("from the arena", rate("kvsidecar_cache_arena_evictions_total")),
               ("from disk", rate("kvsidecar_cache_durable_evictions_total")),
               ("past their time", rate("kvsidecar_cache_expired_chunks_total")))),
        Panel("Writing", "short",
              (("waiting for the disk", "sum(kvsidecar_cache_pending_writes)"),
               ("failing now", "sum(kvsidecar_cache_durable_failing)"),
               ("failed", rate("kvsidecar_cache_failed_writes_total")),
               ("corrupt", rate("kvsidecar_cache_corrupt_chunks_total")))),
        Panel("Workers attached, and what they hold", "short",
              (("sessions", "sum(kvsidecar_cache_sessions)"), ("leases", "sum(kvsidecar_cache_leases)"),
               ("reservations", "sum(kvsidecar_cache_reservations)"))),
        Panel("Longest stall of the daemon's loop", "ms", (("{{instance}}", "kvsidecar_cache_loop_stall_ms"),),
              "Every call waits that long. Above 100: see the runbook."),
        Panel("Time per call", "s",
              (("{{method}}", f"{rate('kvsidecar_cache_call_seconds_total', 'method')} / "
                f"({rate('kvsidecar_cache_calls_total', 'method')} > 0)"),)),
        Panel("Calls that did not succeed", "reqps",
              (("{{method}} {{status}}",
                'sum by (method, status) (rate(kvsidecar_cache_calls_total{status!="OK"}[$__rate_interval]))'),
               ("refused by a limit", rate("kvsidecar_cache_refused_total")))),
        Panel("Requests that went on without the cache", "cps",
              (("{{instance}}", "rate(kvsidecar_worker_cache_failures_total[$__rate_interval])"),)),
    ),
    "The remote tier": (
        Panel("Prompts that it was asked about", "cps",
              (("asked", rate("kvsidecar_cache_remote_lookups_total")),
               ("it added something", rate("kvsidecar_cache_remote_hits_total")),
               ("quicker computed", rate("kvsidecar_cache_remote_bypassed_total")),
               ("stopped waiting", rate("kvsidecar_cache_remote_late_total")))),
        Panel("Bytes to and from it", "Bps",
              (("read", rate("kvsidecar_cache_remote_read_bytes_total")),
               ("written", rate("kvsidecar_cache_remote_written_bytes_total")))),
        Panel("What a look there takes", "ms", (("{{instance}}", "kvsidecar_cache_remote_latency_ms"),)),
        Panel("What goes wrong there", "short",
              (("not used now", "sum(kvsidecar_cache_remote_failing)"),
               ("failed calls", rate("kvsidecar_cache_remote_failures_total")),
               ("wrong values", rate("kvsidecar_cache_remote_rejected_total")),
               ("not written", rate("kvsidecar_cache_remote_dropped_total")),
               ("withheld after a loss", rate("kvsidecar_cache_remote_withheld_total")),
               ("deletions written back", rate("kvsidecar_cache_remote_restored_deletions_total")),
               ("waiting to be written", "sum(kvsidecar_cache_remote_pending)"),
               ("waiting to be deleted", "sum(kvsidecar_cache_remote_deletions)")),
              "Costs the sharing and nothing else: see the runbook."),
    ),
}  # fmt: skip
"""Rows of the dashboard, first the one that is looked at first."""
