"""Thread pools for kernels: torch's OpenMP team, and a pool of our own.

Kernels between torch's own products in a forward pass must run on torch's team: with a second team, the threads of both
would sleep between calls. Chunks are copied in parallel with a forward pass, on our own pool, whose threads sleep when
idle.
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
from kvsidecar.process.cpus import usable_cpus

# Copies of fewer bytes run on the calling thread: waking the other threads takes longer than they save (0.1 ms).
PARALLEL_COPY_BYTES = 2 << 20


@cache
def openmp() -> ctypes.CDLL | None:
    """Load the OpenMP library bundled with torch; None unless it is GNU's."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        with contextlib.suppress(OSError):
            found = ctypes.CDLL(str(path))
            found.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            found.GOMP_parallel.restype = None
            return found
    return None


def run_on_openmp_team(address: ctypes.c_void_p, call: Callable[[int], None], job: int, threads: int) -> None:
    """Run the function at ``address`` on ``threads`` threads of torch's OpenMP team.

    ``call`` calls the same function; it runs on our own threads if torch's team is not available.
    """
    library = openmp()
    if library is None:
        run_on_own_threads(call, job, threads)
    else:
        library.GOMP_parallel(address, job, threads, 0)


def run_on_own_threads(call: Callable[[int], None], job: int, threads: int) -> None:
    """Run the function on the calling thread and on ``threads - 1`` threads of our own."""
    others = [_own_threads().submit(call, job) for _ in range(threads - 1)]
    call(job)
    for other in others:
        other.result()


def clear_thread_affinity() -> None:
    """Allow the calling thread to run on every core that any thread of this process may use.

    OpenMP may have bound each thread of its team to one core, the main thread included. Threads created by the main
    thread inherit that binding and would delay the team.
    """
    if cores := _cores():
        with contextlib.suppress(OSError):  # if not permitted, the thread keeps its cores
            os.sched_setaffinity(0, cores)


def _cores() -> set[int]:
    """Return the cores that any thread of this process may use; empty if the platform cannot tell."""
    found = set[int]()
    if hasattr(os, "sched_getaffinity"):
        for thread in Path("/proc/self/task").glob("*"):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                found |= os.sched_getaffinity(int(thread.name))
    return found


@cache
def num_own_threads() -> int:
    """Return the number of threads that copy chunks."""
    return usable_cpus(len(_cores()))


@cache
def _own_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_own_threads(), "kv-kernel", clear_thread_affinity)
