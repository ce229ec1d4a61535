"""Core affinity of the threads that copy chunks."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from kvkernels.cpu.thread_pool import clear_thread_affinity


def test_a_thread_leaves_the_core_that_its_maker_is_bound_to() -> None:
    everywhere = os.sched_getaffinity(0)

    def bound() -> set[int]:
        os.sched_setaffinity(0, {min(everywhere)})
        with ThreadPoolExecutor(1, initializer=clear_thread_affinity) as threads:
            return threads.submit(os.sched_getaffinity, 0).result()

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(bound).result() == everywhere
