"""Copies between pool and overflow in models where only some layers have a window, after a load of the last window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.node import Node
from tests.inference_svc.windowed import SOME, Windowed, prompt, windowed

POOL, BEYOND = 1024, 4096
STORED = prompt(1, 800)
LONGER = STORED + prompt(2, 600)  # exceeds the pool


@pytest.fixture
def daemon() -> Iterator[Node]:
    """A daemon that has STORED in memory only."""
    with Node(workers=0, arena_bytes="64MiB", durable=False) as node:
        worker = windowed(SOME, node=node)
        worker.answer(STORED)
        worker.close()
        node.settle()
        yield node


@pytest.fixture(scope="module")
def answers() -> Iterator[Windowed]:
    """Correct answers: an engine that keeps all blocks."""
    keeping = windowed(SOME, keep_all=True)
    yield keeping
    keeping.close()


@pytest.fixture
def worker(daemon: Node, tmp_path: Path) -> Iterator[Windowed]:
    """A worker of the daemon with an overflow; its pool has blocks of another prompt."""
    small = windowed(SOME, POOL, daemon, overflow=(tmp_path, BEYOND))
    small.answer(prompt(77, 900), 5, read=False, write=False)
    yield small
    small.close()


def right(answers: Windowed, ids: list[int], length: int = 20) -> list[int]:
    return answers.answer(ids, length, read=False, write=False)[0]


@pytest.mark.parametrize(
    "second", [LONGER, STORED + prompt(3, 100)], ids=["from the pool to the overflow", "from the overflow to the pool"]
)
def test_a_shorter_prefix_of_a_copy_has_the_keys_of_its_window(
    worker: Windowed, answers: Windowed, second: list[int]
) -> None:
    first = STORED if second is LONGER else LONGER
    assert worker.answer(first, 5)[1] == min(len(first) - 1, 800)
    assert worker.answer(second, 5) == (right(answers, second, 5), 800)
    shorter = STORED[:300] + prompt(4, 40)
    assert worker.answer(shorter, 20) == (right(answers, shorter), 300)


def test_a_copy_is_not_stored_from_its_first_token_on(daemon: Node, worker: Windowed, answers: Windowed) -> None:
    assert worker.answer(STORED, 5)[1] == 799
    daemon.restart_daemon()  # its memory is empty now
    assert worker.cache is not None
    (link,) = worker.cache._daemons.values()
    assert link.wait(30)
    assert worker.answer(LONGER, 5)[0] == right(answers, LONGER, 5)
    daemon.settle()
    other = windowed(SOME, node=daemon)
    shorter = STORED[:300] + prompt(5, 40)
    assert other.answer(shorter) == (right(answers, shorter), 0)
    other.close()
