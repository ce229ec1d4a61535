"""Panels of the dashboard, the most urgent row first."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """A graph panel. ``queries`` are (legend, query) pairs; ``unit`` is Grafana's name of the unit."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    text: str = ""


def rate(metric: str, by: str = "") -> str:
    """Return the query of a counter's rate, summed over all processes or, with ``by``, for each value of a label."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}[$__rate_interval]))"


def share(part: str, whole: str) -> str:
    """Return the query of the ratio of two counters' rates. The ratio has no value while the denominator is 0."""
    return f"{rate(part)} / ({rate(whole)} > 0)"


def quantile(q: float, histogram: str) -> str:
    """Return the query of a histogram's quantile over all processes."""
    return f"histogram_quantile({q}, sum by (le) (rate({histogram}_bucket[$__rate_interval])))"


# Paths of requests for answers, without polls and probes.
ANSWERS = 'path=~"/v1/(chat/completions|completions|responses|messages)"'
PROMPT = "kvsidecar_cache_prompt_tokens_total"
FIRST = "vllm:time_to_first_token_seconds"
FIRST_OF_FLEET = "kvsidecar_gateway_ttft_seconds"

# Our gateways and vLLM export the same counters.
QUERIES = "vllm:prefix_cache_queries_total"
POOL_HITS, CACHE_HITS = "vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"

ROWS: dict[str, tuple[Panel, ...]] = {
    "Overview": (
        Panel("Does the cache pay? Cached share of prompt tokens", "percentunit",
              (("all engines", f"({rate(POOL_HITS)} + {rate(CACHE_HITS)}) / ({rate(QUERIES)} > 0)"),
               ("engines' own prefix caches", share(POOL_HITS, QUERIES)),
               ("cache daemon", share(CACHE_HITS, QUERIES)),
               ("{{engine}}: time of loads per saved prefill time",
                f"{rate('kvsidecar_engine_load_seconds_total', 'engine')} / "
                f"({rate('kvsidecar_engine_saved_prefill_seconds_total', 'engine')} > 0)")),
              "Loads pay while their time is below 100 % of the prefill time that they save."),
        Panel("Is it healthy? 0 failures, all processes", "short",
              (("{{process}} processes", "count by (process) (kvsidecar_build_info)"),
               ("failed share of answers",
                f"(sum(rate(kvsidecar_gateway_requests_total{{{ANSWERS},code=~'5..'}}[$__rate_interval])) or vector(0))"
                f" / (sum(rate(kvsidecar_gateway_requests_total{{{ANSWERS}}}[$__rate_interval])) > 0)"),
               ("stores whose disk fails", "sum(kvsidecar_cache_durable_failing)"),
               ("daemons without their remote tier", "sum(kvsidecar_cache_remote_failing)"),
               ("processes killed for memory", f"{rate('kvsidecar_cache_oom_kills_total')} * 60"),
               ("vLLM engines without a daemon", "count(vllm:kvsidecar_attached == 0)"))),
        Panel("Is it full?", "percentunit",
              (("arena", "sum(kvsidecar_cache_arena_used_bytes) / sum(kvsidecar_cache_arena_bytes)"),
               ("disk", "sum(kvsidecar_cache_durable_bytes) / (sum(kvsidecar_cache_durable_budget_bytes) > 0)"),
               ("workers' KV pools",
                "1 - sum(kvsidecar_worker_pool_free_pages) / sum(kvsidecar_worker_pool_pages)")),
              "A full arena or disk is normal: chunks are evicted. A full pool lets requests wait."),
        Panel("What is slow?", "s",
              (("time to first token, p95", quantile(0.95, FIRST)),
               ("Match, mean", "sum(rate(kvsidecar_cache_call_seconds_total{method='Match'}[$__rate_interval])) / "
                               "(sum(rate(kvsidecar_cache_calls_total{method='Match'}[$__rate_interval])) > 0)"),
               ("stall of a daemon's event loop, longest", "max(kvsidecar_cache_loop_stall_seconds)"))),
    ),
    "Reuse": (
        Panel("Cached share of prompt tokens", "percentunit",
              (("all", share("kvsidecar_cache_cached_tokens_total", PROMPT)),
               ("workers' prefix caches", share("kvsidecar_cache_pool_tokens_total", PROMPT)),
               ("matched by the daemon", share("kvsidecar_cache_matched_tokens_total", PROMPT)),
               ("from disk", share("kvsidecar_cache_promoted_tokens_total", PROMPT)),
               ("relocated (content match)", share("kvsidecar_cache_content_tokens_total", PROMPT))),
              "If it falls while the traffic is unchanged: see the runbook, hit ratio."),
        Panel("Time to first token", "s", tuple((f"p{round(q * 100)}", quantile(q, FIRST)) for q in (0.5, 0.95, 0.99))),
        Panel("Time to first token, fleet", "s",
              tuple((f"p{round(q * 100)}", quantile(q, FIRST_OF_FLEET)) for q in (0.5, 0.95, 0.99))),
        Panel("Tokens per second", "short",
              (("prompt", rate("kvsidecar_worker_prompt_tokens_total")),
               ("prompt, cached", rate("kvsidecar_worker_cached_tokens_total")),
               ("generated", rate("kvsidecar_worker_generated_tokens_total")))),
    ),
    "Cost and gain by engine": (
        Panel("Seconds of prefill saved, and spent on loads, per second", "short",
              (("{{engine}}: prefill saved", rate("kvsidecar_engine_saved_prefill_seconds_total", "engine")),
               ("{{engine}}: loads", rate("kvsidecar_engine_load_seconds_total", "engine"))),
              "Reuse pays while the first is above the second."),
        Panel("Bytes loaded and stored", "Bps",
              (("{{engine}}: loaded", rate("kvsidecar_engine_loaded_bytes_total", "engine")),
               ("{{engine}}: stored", rate("kvsidecar_engine_stored_bytes_total", "engine")))),
        Panel("Tokens loaded, and missing by reason", "short",
              (("{{engine}}: loaded", rate("kvsidecar_engine_loaded_tokens_total", "engine")),
               ("{{engine}}: {{kind}}", rate("kvsidecar_engine_miss_tokens_total", "engine, kind")))),
        Panel("Tokens loaded by namespace and tenant", "short",
              (("{{namespace}} {{tenant}}", rate("kvsidecar_engine_loaded_tokens_total", "namespace, tenant")),),
              "Tenants: --metrics-tenants of the daemon."),
    ),
    "Load": (
        Panel("Computed prompt tokens by reason", "short",
              (("{{kind}}", "sum by (kind) (rate(kvsidecar_worker_miss_tokens_total[$__rate_interval]))"),)),
        Panel("Running requests", "short", (("{{instance}}", "kvsidecar_worker_running"),)),
        Panel("Waiting requests", "short", (("{{instance}}", "kvsidecar_worker_waiting"),),
              "The autoscaler's metric."),
        Panel("Workers up", "short", (("{{instance}}", "kvsidecar_gateway_workers_up"),)),
        Panel("Nodes of a fleet", "short",
              (("{{instance}}: configured", "kvsidecar_gateway_nodes"),
               ("{{instance}}: up", "kvsidecar_gateway_nodes_up"))),
        Panel("Time of a fleet's prefix queries", "s",
              tuple((f"p{round(q * 100)}", quantile(q, "kvsidecar_gateway_asking_seconds")) for q in (0.5, 0.99))),
        Panel("Responses by code", "reqps", (("{{code}}", rate("kvsidecar_gateway_requests_total", "code")),)),
        Panel("Free pages of the KV pool", "percentunit",
              (("{{instance}}", "kvsidecar_worker_pool_free_pages / kvsidecar_worker_pool_pages"),)),
        Panel("Overflow of the KV pool", "percentunit",
              (("{{instance}}: pages in use",
                "1 - kvsidecar_worker_overflow_free_pages / (kvsidecar_worker_overflow_pages > 0)"),),
              "When full, long prompts are refused until one of them ends."),
        Panel("Preemptions, retries, cancelled", "cps",
              (("preemptions", rate("kvsidecar_worker_preemptions_total")),
               ("overflows of the pool", rate("kvsidecar_worker_overflowed_total")),
               ("retries on another worker", rate("kvsidecar_gateway_retries_total")),
               ("cancelled", rate("kvsidecar_worker_cancelled_total")))),
    ),
    "Cache": (
        Panel("Arena in use", "percentunit",
              (("{{instance}}", "kvsidecar_cache_arena_used_bytes / kvsidecar_cache_arena_bytes"),), "Full is normal."),
        Panel("GPU arena in use", "percentunit",
              (("{{instance}}", "kvsidecar_cache_gpu_arena_used_bytes / (kvsidecar_cache_gpu_arena_bytes > 0)"),),
              "Full is normal."),
        Panel("GPU arena", "short",
              (("chunks", "sum(kvsidecar_cache_gpu_chunks)"),
               ("tokens read per second", rate("kvsidecar_cache_gpu_tokens_total")),
               ("copies per second", rate("kvsidecar_cache_gpu_copies_total")),
               ("replaced per second", rate("kvsidecar_cache_gpu_evictions_total")))),
        Panel("Disk", "bytes",
              (("chunks", "sum(kvsidecar_cache_durable_bytes)"), ("file", "sum(kvsidecar_cache_durable_file_bytes)"),
               ("budget", "sum(kvsidecar_cache_durable_budget_bytes)"))),
        Panel("Evicted and expired chunks", "cps",
              (("from the arena", rate("kvsidecar_cache_arena_evictions_total")),
               ("from disk", rate("kvsidecar_cache_durable_evictions_total")),
               ("expired", rate("kvsidecar_cache_expired_chunks_total")))),
        Panel("Writes to disk", "short",
              (("pending", "sum(kvsidecar_cache_pending_writes)"),
               ("failing now", "sum(kvsidecar_cache_durable_failing)"),
               ("failed", rate("kvsidecar_cache_failed_writes_total")),
               ("failed reads", rate("kvsidecar_cache_failed_reads_total")),
               ("corrupt", rate("kvsidecar_cache_corrupt_chunks_total")))),
        Panel("Sessions, leases, reservations", "short",
              (("sessions", "sum(kvsidecar_cache_sessions)"), ("leases", "sum(kvsidecar_cache_leases)"),
               ("reservations", "sum(kvsidecar_cache_reservations)"))),
        Panel("Longest stall of the daemon's event loop", "s",
              (("{{instance}}", "kvsidecar_cache_loop_stall_seconds"),),
              "All calls wait that long. Above 0.1: see the runbook."),
        Panel("Time per call", "s",
              (("{{method}}", f"{rate('kvsidecar_cache_call_seconds_total', 'method')} / "
                f"({rate('kvsidecar_cache_calls_total', 'method')} > 0)"),)),
        Panel("Failed calls", "reqps",
              (("{{method}} {{status}}",
                'sum by (method, status) (rate(kvsidecar_cache_calls_total{status!="OK"}[$__rate_interval]))'),
               ("refused by a limit", rate("kvsidecar_cache_refused_total")))),
        Panel("Requests without the cache after a failure", "cps",
              (("{{instance}}", "rate(kvsidecar_worker_cache_failures_total[$__rate_interval])"),)),
    ),
    "vLLM engines": (
        Panel("Lookups by outcome", "cps", (("{{outcome}}", rate("vllm:kvsidecar_lookups_total", "outcome")),)),
        Panel("Tokens loaded; chunks stored", "cps",
              (("tokens loaded", rate("vllm:kvsidecar_loaded_tokens_total")),
               ("chunks stored", rate("vllm:kvsidecar_stored_chunks_total")))),
        Panel("Failed, refused and dropped", "cps",
              (("failed loads", rate("vllm:kvsidecar_failed_loads_total")),
               ("failed stores", rate("vllm:kvsidecar_failed_stores_total")),
               ("refused chunks", rate("vllm:kvsidecar_refused_chunks_total")),
               ("dropped stores", rate("vllm:kvsidecar_dropped_stores_total"))),
              "The engine computes instead: no request fails."),
    ),
    "Remote tier": (
        Panel("Remote lookups", "cps",
              (("lookups", rate("kvsidecar_cache_remote_lookups_total")),
               ("hits", rate("kvsidecar_cache_remote_hits_total")),
               ("bypassed, faster to compute", rate("kvsidecar_cache_remote_bypassed_total")),
               ("timed out", rate("kvsidecar_cache_remote_late_total")))),
        Panel("Remote bytes", "Bps",
              (("read", rate("kvsidecar_cache_remote_read_bytes_total")),
               ("written", rate("kvsidecar_cache_remote_written_bytes_total")))),
        Panel("Remote latency", "s", (("{{instance}}", "kvsidecar_cache_remote_latency_seconds"),)),
        Panel("Remote failures", "short",
              (("unavailable now", "sum(kvsidecar_cache_remote_failing)"),
               ("failed calls", rate("kvsidecar_cache_remote_failures_total")),
               ("rejected values", rate("kvsidecar_cache_remote_rejected_total")),
               ("dropped writes", rate("kvsidecar_cache_remote_dropped_total")),
               ("losses of its data", rate("kvsidecar_cache_remote_data_losses_total")),
               ("tenants to be written again", "sum(kvsidecar_cache_remote_refilling_tenants)"),
               ("withheld after a lost epoch", rate("kvsidecar_cache_remote_withheld_total")),
               ("restored deletions", rate("kvsidecar_cache_remote_restored_deletions_total")),
               ("pending writes", "sum(kvsidecar_cache_remote_pending)"),
               ("pending deletions", "sum(kvsidecar_cache_remote_deletions)")),
              "Only sharing between nodes is affected: see the runbook."),
    ),
}  # fmt: skip
"""Rows of the dashboard, the most urgent first."""
