"""What workers of tests do otherwise, so that a busy machine changes no outcome.

A worker computes a prompt if its daemon does not answer in half a second, and if two loads took 10 ms longer than
computing: on a busy machine, both happen. Tests of these decisions set their own times.
"""

from __future__ import annotations

from inference_svc.kv_client import load_cost_model

ENVIRONMENT = {"KVSIDECAR_WORKER_CACHE_TIMEOUT_MS": "20000"}
_MARGIN_SECONDS = 0.5


def prefer_loads() -> None:
    """Let workers of this process load what is stored, unless that takes much longer than computing it."""
    load_cost_model._MARGIN_SECONDS = _MARGIN_SECONDS
