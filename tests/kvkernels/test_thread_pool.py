"""On which cores chunks are moved."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from kvkernels.cpu.thread_pool import spread


def test_a_thread_leaves_the_core_that_its_maker_is_bound_to() -> None:
    everywhere = os.sched_getaffinity(0)

    def bound() -> set[int]:
        os.sched_setaffinity(0, {min(everywhere)})
        with ThreadPoolExecutor(1, initializer=spread) as threads:
            return threads.submit(os.sched_getaffinity, 0).result()

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(bound).result() == everywhere
