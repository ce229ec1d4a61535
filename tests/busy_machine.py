"""Longer decision times for workers and fleet gateways, for tests on a busy machine."""

from __future__ import annotations

ENVIRONMENT = {"KVSIDECAR_WORKER_CACHE_TIMEOUT_MS": "10000"}
"""Settings of a worker that waits 10 s for the daemon's answers. The product's timeout is 0.5 s."""


def prefer_loads() -> None:
    """Let workers of this process load stored chunks unless a load takes a second longer than the prefill.

    The product's margin is 10 ms. On a busy machine, two loads in a row exceed this margin by chance, and the worker
    then bypasses the next load.
    """
    from inference_svc.kv_client import load_cost_model

    load_cost_model._MARGIN_SECONDS, load_cost_model._MIN_TIMEOUT_SECONDS = 1.0, 10.0


def wait_for_nodes() -> None:
    """Let fleet gateways of this process wait 10 s for a node's cached prefix.

    The product's timeout is 0.5 s, after which the node counts as a node without a cached prefix.
    """
    from inference_svc.gateway.fleet import prefix_query

    prefix_query._TIMEOUT_SECONDS = 10.0
