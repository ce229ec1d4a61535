"""Latencies of an answer, whatever number of tokens its messages have."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from kvsidecar.inference.v1 import inference_pb2 as pb
from prometheus_client import CollectorRegistry

from inference_svc.gateway.gateway_metrics import GatewayMetrics
from inference_svc.gateway.worker_router import WorkerRouter


def _latencies(registry: CollectorRegistry, name: str) -> tuple[float, float]:
    """Return the count and the sum of a histogram."""
    found = [registry.get_sample_value(f"vllm:{name}_seconds_{of}", {"model_name": "m"}) for of in ("count", "sum")]
    return found[0] or 0.0, found[1] or 0.0


@pytest.mark.parametrize(
    ("messages", "between"),
    [
        ([(1.0, 1), (1.5, 1), (2.5, 1)], 1.5),
        ([(1.0, 1), (1.5, 3), (2.5, 2)], 1.5),
        ([(1.0, 4), (3.0, 1)], 2.0),  # the four arrived at once
        ([(1.0, 2), (2.0, 0)], 0.0),  # the last message only says why the answer ended
    ],
)
def test_each_token_after_the_first_has_one_latency(
    messages: list[tuple[float, int]], between: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of several tokens counted as one token, so dashboards showed a slower worker than there was."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    metrics = GatewayMetrics(WorkerRouter([]))
    timer = metrics.answer()
    for clock.now, tokens in messages:
        timer.add("m", pb.GenerateStreamResponse(token_ids=range(tokens)))
    assert _latencies(metrics.registry, "time_to_first_token") == (1, 1.0)
    count, total = _latencies(metrics.registry, "inter_token_latency")
    assert count == sum(tokens for _, tokens in messages) - 1
    assert total == pytest.approx(between)
