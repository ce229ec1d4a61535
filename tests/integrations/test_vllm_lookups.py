"""Statistics of lookups that the vLLM connector reports, and the hints of its requests."""

from __future__ import annotations

import time
from contextlib import closing
from types import SimpleNamespace

from benchmarks.node import Node
from tests.integrations.connector_pair import PROMPT, WHOLE, Request, Vllm
from tests.kvsidecar.kv_transfer.caches import BLOCK_TOKENS


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


def test_the_hints_of_a_request_reach_its_chunks() -> None:
    """The first block is retained, at the store and again at the next lookup; actions are counted."""
    with Node(workers=0, arena_bytes="8MiB") as node, closing(Vllm(node, "hinted")) as one:
        directives = [{"end": BLOCK_TOKENS, "priority": 50, "duration": 600}]
        actions = [
            SimpleNamespace(action_type="kv.retain", action_version="1.0", payload={"directives": directives}),
            SimpleNamespace(action_type="kv.fetch", action_version="1.0", payload={}),
            SimpleNamespace(action_type="kv.share", action_version="1.0", payload={}),
        ]
        before = node.cache_stats().retained_bytes
        first = Request("a", PROMPT, kv_hints=SimpleNamespace(actions=actions))
        assert one.matched(first) == (0, False)
        one.compute(first, [0, 1, 2, 3, 4])
        stats = one.scheduler.take_stats()
        assert (stats["applied_hints"], stats["ignored_hints"]) == (2, 1)
        retained = node.cache_stats().retained_bytes - before
        assert 0 < retained < len(one.payload(0, [0, 1, 2, 3])) / 3
        whole = [{"priority": 50, "duration": 600}]
        actions[0] = SimpleNamespace(action_type="kv.retain", action_version="1.0", payload={"directives": whole})
        again = Request("b", PROMPT, kv_hints=SimpleNamespace(actions=actions))
        assert one.matched(again) == (WHOLE, True)
        assert node.cache_stats().retained_bytes - before == 4 * retained
