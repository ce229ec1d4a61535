"""Times by which workers and fleets decide, for tests on a busy machine."""

from __future__ import annotations


def prefer_loads() -> None:
    """Lets workers of this process load what is stored, unless it takes a second longer than computing.

    In the product it is 10 ms; on a busy machine two loads in a row take longer than that, and the next is bypassed.
    """
    from inference_svc.kv_client import load_cost_model

    load_cost_model._MARGIN_SECONDS, load_cost_model._MIN_TIMEOUT_SECONDS = 1.0, 10.0


def wait_for_nodes() -> None:
    """Lets fleet gateways of this process wait 10 s for a node's prefixes, instead of asking another node."""
    from inference_svc.gateway.fleet import prefix_query

    prefix_query._TIMEOUT_SECONDS = 10.0
