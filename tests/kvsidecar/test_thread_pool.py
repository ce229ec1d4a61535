"""Thread pools that start no thread later."""

from __future__ import annotations

import threading

import pytest
from kvsidecar.process.thread_pool import started_pool


class Refusing:
    """A replacement of ``Thread.start`` that the system allows so many threads."""

    def __init__(self, allowed: int) -> None:
        self.allowed, self._start = allowed, threading.Thread.start

    def __call__(self, thread: threading.Thread) -> None:
        if not self.allowed:
            raise RuntimeError("can't start new thread")
        self.allowed -= 1
        self._start(thread)


def test_work_needs_no_new_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = started_pool(3, "work")
    refusing = Refusing(0)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: refusing(thread))
    together = threading.Barrier(3)
    for done in [pool.submit(together.wait, 20) for _ in range(3)]:
        done.result(20)
    pool.shutdown()


def test_a_pool_that_may_not_start_all_threads_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before, refusing = set(threading.enumerate()), Refusing(2)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: refusing(thread))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        started_pool(3, "work")
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
    assert set(threading.enumerate()) <= before
