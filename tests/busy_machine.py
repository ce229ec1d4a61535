"""Times by which workers decide between loading and computing, for tests on a busy machine."""

from __future__ import annotations

from inference_svc.kv_client import load_cost_model


def prefer_loads() -> None:
    """Lets workers of this process load what is stored, unless it takes a second longer than computing.

    In the product it is 10 ms; on a busy machine two loads in a row take longer than that, and the next is bypassed.
    """
    load_cost_model._MARGIN_SECONDS, load_cost_model._MIN_TIMEOUT_SECONDS = 1.0, 10.0
