"""Two nodes with one remote tier, through and through: real workers, real daemons, a real server."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

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
            _until(lambda: a.cache_stats().remote_written_chunks > 0 and a.cache_stats().remote_pending == 0)
            asked = history + questions[-1]
            found = b.client().generate(asked, max_tokens=ANSWER_TOKENS, temperature=0)
            assert found.cached_tokens > len(history) - 250, "what A read, B has not computed, tails included"
            assert b.cache_stats().remote_tokens == found.cached_tokens
            plain = b.client().generate(asked, max_tokens=ANSWER_TOKENS, temperature=0, skip_cache=True)
            assert found.token_ids == plain.token_ids
            server.stop()
            later = b.client().generate(document[::-1], max_tokens=ANSWER_TOKENS, temperature=0)
            assert len(later.token_ids) == ANSWER_TOKENS, "nobody needs the tier"


def _until(done: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)
