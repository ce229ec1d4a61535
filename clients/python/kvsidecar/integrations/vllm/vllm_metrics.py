"""Transfer statistics in vLLM's log and at its ``/metrics``."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvsidecar.integrations.vllm.transfer_stats import ATTACHED, COUNTERS, LOOKUPS


class ConnectorStats(KVConnectorStats):
    """Sums of ``TransferStats`` over an interval, and the last value of ``attached``."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        attached = other.data.get(ATTACHED, self.data.get(ATTACHED))
        self.data = dict(Counter(self.data) + Counter(other.data))
        if attached is not None:
            self.data[ATTACHED] = attached
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """Prometheus metrics ``vllm:kvsidecar_*``, with the labels of each engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(f"vllm:kvsidecar_{name}_total", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._lookups = self._counter_cls(
            "vllm:kvsidecar_lookups_total",
            documentation="Prompts by the outcome of their lookup: "
            + "; ".join(f"{name} ({text})" for name, text in LOOKUPS.items()),
            labelnames=[*labelnames, "outcome"],
        )
        self._attached = self._gauge_cls(
            "vllm:kvsidecar_attached",
            documentation="1 while all ranks have a session with the cache daemon; as of the last step",
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            metric, _, outcome = name.partition(".")
            if metric == ATTACHED:
                self._attached.labels(*labels).set(value)
            elif outcome:
                self._lookups.labels(*labels, outcome).inc(value)
            else:
                self._counters[name].labels(*labels).inc(value)
