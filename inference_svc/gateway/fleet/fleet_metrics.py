"""Prometheus metrics of a fleet gateway."""

from __future__ import annotations

from prometheus_client import Gauge, Histogram

from inference_svc.gateway.fleet.node_discovery import NodeDiscovery
from inference_svc.gateway.request_counters import RequestCounters


class FleetMetrics(RequestCounters):
    """Request counters, TTFT, prefix query times and node counts of a fleet gateway."""

    def __init__(self) -> None:
        super().__init__()
        self.ttft = Histogram(
            "kvsidecar_gateway_ttft_seconds",
            "From arrival to the first token",
            registry=self.registry,
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
        )
        self.prefix_query_seconds = Histogram(
            "kvsidecar_gateway_asking_seconds",
            "Time to hear from the nodes what they have of a prompt",
            registry=self.registry,
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1),
        )

    def watch(self, discovery: NodeDiscovery) -> None:
        known = Gauge("kvsidecar_gateway_nodes", "Nodes that are named", registry=self.registry)
        known.set_function(lambda: len(discovery.all))
        up = Gauge("kvsidecar_gateway_nodes_up", "Nodes that serve", registry=self.registry)
        up.set_function(lambda: len(discovery.alive))
