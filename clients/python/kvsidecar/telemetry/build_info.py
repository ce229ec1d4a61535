"""Prometheus metric ``kvsidecar_build_info``: a process's kind and version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from prometheus_client.core import InfoMetricFamily, Metric

from kvsidecar import __version__


class BuildInfoCollector:
    """Collector of one series, whose value is 1."""

    def __init__(self, process: Literal["daemon", "worker", "gateway"]) -> None:
        self._process = process

    def collect(self) -> Iterable[Metric]:
        labels = {"process": self._process, "version": __version__}
        yield InfoMetricFamily("kvsidecar_build", "Kind and version of the process", labels)
