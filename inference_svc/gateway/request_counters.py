"""Request counters of node and fleet gateways; workers and daemon have metrics of their own."""

from __future__ import annotations

from kvsidecar.telemetry.build_info import BuildInfoCollector
from prometheus_client import CollectorRegistry, Counter


class RequestCounters:
    """Counters of HTTP requests: answered, refused, aborted, retried."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(BuildInfoCollector("gateway"))
        self.requests = Counter("kvsidecar_gateway_requests", "HTTP requests", ["path", "code"], registry=self.registry)
        self.refused = Counter(
            "kvsidecar_gateway_refused",
            "HTTP requests and connections that were refused before they were read to their end",
            ["reason"],
            registry=self.registry,
        )
        self.aborted = Counter(
            "kvsidecar_gateway_aborted",
            "Streams that ended with an error after their first bytes",
            ["reason"],
            registry=self.registry,
        )
        self.kv_hint_actions = Counter(
            "kvsidecar_gateway_kv_hint_actions",
            "Actions in the KV hints of requests: applied, or unknown or malformed and ignored",
            ["result"],
            registry=self.registry,
        )
        self.retries = Counter(
            "kvsidecar_gateway_retries", "Requests sent to a second worker or node", registry=self.registry
        )
