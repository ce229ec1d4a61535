"""Statistics of lookups that the vLLM connector reports."""

from __future__ import annotations

import time
from contextlib import closing

from benchmarks.node import Node
from tests.integrations.connector_pair import PROMPT, Request, Vllm


def test_lookups_are_counted_by_outcome_and_the_session_is_reported() -> None:
    with (
        Node(workers=0, arena_bytes="8MiB", daemon_flags={"heartbeat_ms": 1000}) as short,
        closing(Vllm(short, "counted")) as one,
    ):
        one.matched(Request("a", PROMPT))
        assert one.scheduler.take_stats() == {"lookups.skipped": 1, "attached": 1.0}
        one.compute(Request("b", PROMPT), [0, 1, 2, 3, 4])
        one.matched(Request("c", PROMPT))
        one.matched(Request("d", [9, *PROMPT]))
        found = one.scheduler.take_stats()
        assert found.pop("lookups.hit") == 1
        assert sum(found.values()) == 1, "d is a miss, or excluded by the filter"
        short.kill("daemon")
        deadline = time.monotonic() + 10
        while (found := one.scheduler.take_stats()) != {"attached": 0.0}:
            assert not found
            assert time.monotonic() < deadline
            time.sleep(0.01)
        one.matched(Request("e", PROMPT))
        assert one.scheduler.take_stats() == {"lookups.detached": 1}
