"""Prometheus metrics of a node's gateway, under vLLM's names where the meaning is equal.

Dashboards, autoscalers and routers for vLLM therefore work with a node. The label "engine" names a worker.
``prefix_cache`` counts hits in a worker's own pool; ``external_prefix_cache`` counts hits in the cache daemon.
Histograms cover the answers of this gateway, and counters cover all work of its workers. Workers and daemon have their
own metrics, too.
https://docs.vllm.ai/en/latest/usage/metrics/
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.process.node_report import read_reports
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from inference_svc.gateway.openai_fields import finish_reason
from inference_svc.gateway.request_counters import RequestCounters
from inference_svc.gateway.request_log import log_line
from inference_svc.gateway.worker_router import WorkerRouter

# vLLM's buckets.
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_INTER_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
# Buckets of OpenTelemetry's conventions for GenAI.
_GEN_AI_DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_Reading = Callable[[pb.GetStatsResponse], float]
_GAUGES: dict[str, tuple[str, _Reading]] = {
    "num_requests_running": ("Requests in the batch", lambda s: s.running),
    "num_requests_waiting": ("Requests that wait for a place in the batch", lambda s: s.waiting),
    "kv_cache_usage_perc": (
        "Share of the pool that running requests hold; 1 is all of it",
        lambda s: 1 - s.pool_free_pages / s.pool_pages if s.pool_pages else 0.0,
    ),
}
_COUNTERS: dict[str, tuple[str, _Reading]] = {
    "prompt_tokens": ("Tokens of all prompts", lambda s: s.prompt_tokens),
    "generation_tokens": ("Tokens of answers", lambda s: s.generated_tokens),
    "prompt_tokens_cached": ("Tokens of prompts that were not computed anew", lambda s: s.cached_tokens),
    "prefix_cache_queries": (
        "Tokens of prompts that the worker's pool was searched for: not those of requests that skip the cache",
        lambda s: s.prompt_tokens - s.skipping_tokens,
    ),
    "prefix_cache_hits": ("Of these, tokens that it had", lambda s: s.resident_tokens),
    "external_prefix_cache_queries": (
        "Tokens that the pool did not have, and the cache was searched for",
        lambda s: s.prompt_tokens - s.skipping_tokens - s.resident_tokens,
    ),
    "external_prefix_cache_hits": ("Of these, tokens that it had", lambda s: s.cached_tokens - s.resident_tokens),
    "num_preemptions": ("Requests that gave their pages back and were queued again", lambda s: s.preemptions),
    "spec_decode_num_drafts": ("Times that a request's guesses were verified", lambda s: s.drafts),
    "spec_decode_num_draft_tokens": ("Guessed tokens that were verified", lambda s: s.draft_tokens),
    "spec_decode_num_accepted_tokens": ("Of these, tokens of answers", lambda s: s.accepted_tokens),
    "spec_decode_num_branches": ("Branches verified beside the first of a draft", lambda s: s.draft_branches),
    "spec_decode_num_branched_tokens": ("Accepted tokens of such a branch", lambda s: s.branched_tokens),
}
_LABELS = ("model_name", "engine")


class GatewayMetrics(RequestCounters):
    """All metrics at ``/metrics``."""

    def __init__(self, router: WorkerRouter, supervisor_dir: Path | None = None) -> None:
        super().__init__()
        registry = self.registry

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, ("model_name",), buckets=buckets, registry=registry)

        up = Gauge("kvsidecar_gateway_workers_up", "Workers that answer", registry=registry)
        up.set_function(lambda: sum(w.alive for w in router.workers))
        self.success = counter("vllm:request_success", "Answers by how they ended", ("model_name", "finished_reason"))
        self.ttft = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", _TTFT_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "From one token to the next", _INTER_TOKEN_BUCKETS
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last token", _LATENCY_BUCKETS
        )
        self.queue_time = histogram("request_queue_time_seconds", "Waiting for a place in the batch", _LATENCY_BUCKETS)
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "Computing up to the first token", _LATENCY_BUCKETS
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "From the first token to the last", _LATENCY_BUCKETS
        )
        self.prompt_tokens = histogram("request_prompt_tokens", "Tokens of a prompt", _TOKEN_BUCKETS)
        self.generation_tokens = histogram("request_generation_tokens", "Tokens of an answer", _TOKEN_BUCKETS)
        self.gen_ai = GenAiMetrics(registry)
        registry.register(_WorkerCollector(router))
        if supervisor_dir is not None:
            registry.register(_RestartCollector(supervisor_dir))

    def answer(self) -> AnswerTimer:
        """Start the timer of an answer."""
        return AnswerTimer(self, time.perf_counter())


class GenAiMetrics:
    """Latencies under OpenTelemetry's names for GenAI servers, as its Prometheus exporter writes them.

    https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(
                f"gen_ai_server_{name}", text, ("gen_ai_request_model",), buckets=buckets, registry=registry
            )

        self.ttft = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", _TTFT_BUCKETS[:16]
        )
        self.duration = histogram(
            "request_duration_seconds", "From a request's arrival to its last token", _GEN_AI_DURATION_BUCKETS
        )
        self.time_per_output_token = histogram(
            "time_per_output_token_seconds", "Mean time of a token after the first", _INTER_TOKEN_BUCKETS[:13]
        )

    def answered(self, model: str, ttft_seconds: float, seconds: float, tokens: int) -> None:
        """Record a complete answer."""
        self.ttft.labels(model).observe(ttft_seconds)
        self.duration.labels(model).observe(seconds)
        if tokens > 1:
            self.time_per_output_token.labels(model).observe((seconds - ttft_seconds) / (tokens - 1))


@dataclass
class AnswerTimer:
    """Times one answer, from its arrival to its end."""

    metrics: GatewayMetrics
    began: float
    first: float = 0.0
    last: float = 0.0

    @property
    def started(self) -> bool:
        """Return whether the answer's first message has arrived."""
        return self.last > 0

    def add(self, model: str, part: pb.GenerateStreamResponse) -> None:
        """Record the next message of the answer; ``model`` is the worker's."""
        m, now, tokens = self.metrics, time.perf_counter(), len(part.token_ids)
        gap = (now - self.last) / tokens if self.started and tokens else 0.0
        if not self.started:
            self.first, tokens = now, tokens - 1
            m.ttft.labels(model).observe(now - self.began)
            log_line().first_token()
        for _ in range(tokens):  # each token of a message has an equal share of the time since the last message
            m.inter_token_latency.labels(model).observe(gap)
        self.last = now
        if part.finish_reason:
            m.success.labels(model, finish_reason(part.finish_reason) or "").inc()
            m.e2e_latency.labels(model).observe(now - self.began)
            m.gen_ai.answered(model, self.first - self.began, now - self.began, part.usage.generated_tokens)
            m.queue_time.labels(model).observe(part.timings.queue_ms / 1e3)
            m.prefill_time.labels(model).observe(part.timings.prefill_ms / 1e3)
            m.decode_time.labels(model).observe(part.timings.decode_ms / 1e3)
            m.prompt_tokens.labels(model).observe(part.usage.prompt_tokens)
            m.generation_tokens.labels(model).observe(part.usage.generated_tokens)
            log_line().answered(model, part.usage)
            if part.HasField("miss"):
                log_line().missed(part.miss)


class _WorkerCollector:
    """Collector of the latest statistics from each live worker."""

    def __init__(self, router: WorkerRouter) -> None:
        self._router = router

    def collect(self) -> Iterable[Metric]:
        known = [
            (worker.stats, (worker.model.model_id, str(i)))
            for i, worker in enumerate(self._router.workers)
            if worker.alive and worker.stats is not None
        ]
        kinds: tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], dict[str, tuple[str, _Reading]]], ...]
        kinds = ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS))
        for family, named in kinds:
            for name, (text, read) in named.items():
                metric = family(f"vllm:{name}", text, labels=_LABELS)
                for stats, labels in known:
                    metric.add_metric(labels, read(stats))
                yield metric
        yield from _misses(known)


def _misses(known: list[tuple[pb.GetStatsResponse, tuple[str, str]]]) -> Iterable[Metric]:
    text = "Requests that computed more than the last token of their prompt, by reason"
    requests = CounterMetricFamily("kvsidecar_gateway_misses", text, labels=(*_LABELS, "kind"))
    tokens = CounterMetricFamily(
        "kvsidecar_gateway_miss_tokens", "Tokens that they computed", labels=(*_LABELS, "kind")
    )
    for stats, labels in known:
        for miss in stats.misses:
            requests.add_metric((*labels, miss.kind), miss.requests)
            tokens.add_metric((*labels, miss.kind), miss.tokens)
    return requests, tokens


class _RestartCollector:
    """Collector of process restarts, which the supervisor (this process's parent) reports in files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        metric = CounterMetricFamily(
            "kvsidecar_process_restarts",
            "Times that a process of the node was started again: it died, was silent, or was killed for memory",
            labels=("process", "reason"),
        )
        for name, report in read_reports(self._folder, os.getppid()).items():
            metric.add_metric((name, "died"), report.deaths)
            metric.add_metric((name, "silent"), report.kills)
            metric.add_metric((name, "memory"), report.oom_kills)
        yield metric
