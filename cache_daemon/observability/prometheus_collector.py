"""Prometheus collector: reads the store's statistics at every scrape."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cache_daemon.observability.metric_definitions import COUNTERS, GAUGES, SECONDS
from cache_daemon.observability.reuse_metrics import COUNTERS as COUNTERS_OF_REUSE
from cache_daemon.observability.reuse_metrics import MISSES, ReuseLabels
from cache_daemon.observability.stats_snapshot import StatsSnapshots

_PREFIX, _REUSE_PREFIX = "kvsidecar_cache_", "kvsidecar_engine_"


class StoreCollector:
    """Collector of the daemon's metrics."""

    def __init__(self, snapshots: StatsSnapshots) -> None:
        self._snapshots = snapshots

    def collect(self) -> Iterable[Metric]:
        stats = self._snapshots.take()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(_PREFIX + name, text, value=getattr(stats, name))
            if name in SECONDS:
                text = text.replace(", in milliseconds", ", in seconds")
                yield GaugeMetricFamily(_PREFIX + SECONDS[name], text, value=getattr(stats, name) / 1e3)
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(_PREFIX + name, text, value=getattr(stats, name))
        yield GaugeMetricFamily(
            _PREFIX + "durable_failing",
            "1 while writes to the durable tier fail",
            value=bool(stats.durable_failing),
        )
        yield GaugeMetricFamily(
            _PREFIX + "remote_failing",
            "1 while the remote tier is disabled by failures",
            value=bool(stats.remote_failing),
        )
        calls = self._snapshots.calls
        counted = CounterMetricFamily(_PREFIX + "calls", "Calls by method and outcome", labels=("method", "status"))
        for (method, status), count in list(calls.totals.items()):
            counted.add_metric((method, status), count)
        yield counted
        spent = CounterMetricFamily(_PREFIX + "call_seconds", "Time spent in calls by method", labels=("method",))
        for method, seconds in list(calls.seconds.items()):
            spent.add_metric((method,), seconds)
        yield spent
        yield from self._reuse()

    def _reuse(self) -> Iterable[Metric]:
        totals = sorted(self._snapshots.reuse.totals.items())
        for name, text in COUNTERS_OF_REUSE.items():
            family = CounterMetricFamily(_REUSE_PREFIX + name, text, labels=ReuseLabels._fields)
            for labels, counts in totals:
                family.add_metric(labels, getattr(counts, name))
            yield family
        for name, text in MISSES.items():
            family = CounterMetricFamily(_REUSE_PREFIX + name, text, labels=(*ReuseLabels._fields, "kind"))
            for labels, counts in totals:
                for kind, count in list(getattr(counts, name).items()):
                    family.add_metric((*labels, kind), count)
            yield family
