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


def spread() -> None:
    """Lets the calling thread run wherever any thread of this process may. OpenMP may have bound each thread of its
    team to a core of its own, the first included: what the first one makes would stay there and hold all of them up."""
    if cores := _cores():
        with contextlib.suppress(OSError):  # where it may not, it works on fewer
            os.sched_setaffinity(0, cores)


def _cores() -> set[int]:
    """Empty where nobody can say."""
    found = set[int]()
    if hasattr(os, "sched_getaffinity"):
        for thread in Path("/proc/self/task").glob("*"):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                found |= os.sched_getaffinity(int(thread.name))
    return found


@cache
def own_count() -> int:
    """How many threads chunks are moved on."""
    return len(_cores()) or os.cpu_count() or 1


@cache
def _own_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(own_count(), "kv-kernel", spread)
