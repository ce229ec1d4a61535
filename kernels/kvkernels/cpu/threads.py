"""Runs a kernel on torch's OpenMP team, or on threads of our own.

What runs between a forward's products must run on torch's team: with a second one, both would go to sleep between
calls. Chunks are moved beside a forward, on threads of our own, which sleep when they have nothing to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch


@cache
def openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch brings along, where it is GNU's."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        with contextlib.suppress(OSError):
            found = ctypes.CDLL(str(path))
            found.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            found.GOMP_parallel.restype = None
            return found
    return None


def run_team(address: ctypes.c_void_p, call: Callable[[int], None], job: int, threads: int) -> None:
    """The function at ``address``, which ``call`` calls, once on each of so many threads of torch's team; of our own
    where torch's cannot be had."""
    library = openmp()
    if library is None:
        run_own(call, job, threads)
    else:
        library.GOMP_parallel(address, job, threads, 0)


def run_own(call: Callable[[int], None], job: int, threads: int) -> None:
    """The function once on this thread and on so many less one of our own."""
    others = [_own_threads().submit(call, job) for _ in range(threads - 1)]
    call(job)
    for other in others:
        other.result()


@cache
def own_count() -> int:
    """How many threads chunks are moved on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _own_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(own_count(), "kv-kernel")
