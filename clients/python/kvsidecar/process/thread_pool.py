"""Thread pools that start no thread later."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool(threads: int, name: str) -> ThreadPoolExecutor:
    """Create a pool whose threads all run already. Raises RuntimeError if the system refuses a thread.

    ThreadPoolExecutor starts threads when work arrives. If the system then refuses a thread, ``submit`` raises, but the
    work stays in the queue and may still run. So a pool of work that must not fail starts its threads first.
    """
    pool, all_run = ThreadPoolExecutor(threads, name), threading.Barrier(threads + 1)
    try:
        for _ in range(threads):
            pool.submit(all_run.wait)  # no thread is idle before all run, so each call starts one
    except BaseException:
        all_run.abort()
        pool.shutdown(wait=False)
        raise
    all_run.wait()
    return pool
