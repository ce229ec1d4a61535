"""Conditions and repair method of approximate reuse."""

from __future__ import annotations

from typing import Any

import pytest
from kvsidecar.cache.v1.cache_pb2 import ReuseVerdict

from inference_svc.context_reuse.chunking import new_chunker
from inference_svc.context_reuse.reuse_policy import ReusePolicy
from inference_svc.context_reuse.selectors import SELECTORS

ROTARY: Any = object()


def policy(
    repair: str = "auto", unverified: bool = False, rotary: Any = ROTARY, ratio: float | None = 0.15
) -> ReusePolicy:
    return ReusePolicy(new_chunker("fixed", 64), rotary, SELECTORS.get(repair), ratio, True, unverified)


def verdict(strategy: str = "guided_4", ratio: float = 0.15, passed: bool = True) -> ReuseVerdict:
    return ReuseVerdict(strategy=strategy, ratio=ratio, passed=passed)


@pytest.mark.parametrize(
    ("chosen", "given", "expected"),
    [
        (policy(), verdict(), "guided_4"),
        (policy("guided_4"), verdict(), "guided_4"),
        (policy(), verdict(ratio=0.05), "guided_4"),
        (policy(unverified=True), None, "guided"),
        (policy("cacheblend", True), verdict(), "cacheblend"),
        (policy(), None, None),
        (policy(), verdict(passed=False), None),
        (policy("guided"), verdict(), None),  # another repair was verified
        (policy(), verdict(ratio=0.3), None),  # more was computed again than this worker would
        (policy(), verdict("of another version"), None),
        (policy(unverified=True, rotary=None), verdict(), None),
    ],
)
def test_the_repair_follows_from_setting_and_verdict(
    chosen: ReusePolicy, given: ReuseVerdict | None, expected: str | None
) -> None:
    found = chosen.recompute_setting(given)
    assert (found.selector.name if found else None) == expected
    assert found is None or found.ratio == 0.15


def test_without_a_setting_the_share_is_the_verified_one() -> None:
    found = policy(ratio=None).recompute_setting(verdict("salient", ratio=0.3))
    assert found is not None
    assert (found.selector.name, found.ratio) == ("salient", 0.3)
    insisted = policy(unverified=True, ratio=None).recompute_setting(None)
    assert insisted is not None
    assert insisted.ratio == 0.15
