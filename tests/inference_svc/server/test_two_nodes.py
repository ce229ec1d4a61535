"""Two nodes with one remote tier, through and through: real workers, real daemons, a real server."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from kvsidecar.requests import to_request

from benchmarks.condition_wait import until
from benchmarks.node import Node
from benchmarks.remote_servers import RedisServer, why_no_valkey

pytestmark = pytest.mark.skipif(bool(why_no_valkey()), reason=why_no_valkey())
ANSWER_TOKENS = 12


def test_what_one_node_has_read_another_answers_from(tmp_path: Path) -> None:
    rng = random.Random(7)
    document, *questions = ([rng.randrange(16, 4000) for _ in range(n)] for n in (500, 100, 130, 90, 24))
    with RedisServer(tmp_path / "redis") as server:
        flags = {"remote": server.url, "remote_write": "all"}
        small = {"arena_bytes": "64MiB", "pool_bytes": "32MiB", "worker_flags": {"resident_sequences": 0}}
        with Node(daemon_flags=flags, **small) as a, Node(daemon_flags=flags, **small) as b:  # type: ignore[arg-type]
            # A conversation of four turns, each of which ends somewhere within a chunk.
            history = document
            for question in questions[:-1]:
                history = history + question
                history = history + a.client().generate(history, max_tokens=ANSWER_TOKENS, temperature=0).token_ids
                a.settle()
            until(lambda: a.cache_stats().remote_written_chunks > 0 and a.cache_stats().remote_pending == 0)
            # Fetch, whatever the demo model would take to compute; what comes too late serves the next request.
            request = to_request(history + questions[-1], max_tokens=ANSWER_TOKENS, temperature=0)
            request.cache.fetch = request.cache.skip_write = True
            found = b.client().stub.Generate(request)
            deadline = time.monotonic() + 60
            while found.usage.cached_tokens <= len(history) - 250:
                assert time.monotonic() < deadline, f"B computed what A had read: {found.usage}"
                found = b.client().stub.Generate(request)
            assert b.cache_stats().remote_tokens == found.usage.cached_tokens
            request.cache.skip_read = True
            assert found.token_ids == b.client().stub.Generate(request).token_ids
            server.stop()
            later = b.client().generate(document[::-1], max_tokens=ANSWER_TOKENS, temperature=0)
            assert len(later.token_ids) == ANSWER_TOKENS, "nobody needs the tier"
