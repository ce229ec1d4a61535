"""Compiles CPU kernels with numba (its LLVM comes in the wheel) and runs them on a few threads.

numba's own thread pool is not used: it may not be entered from two threads at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

try:
    from numba import njit
except ImportError:  # torch serves instead
    AVAILABLE = False

    def njit(**_: Any) -> Callable[[Any], Any]:
        return lambda function: function
else:
    AVAILABLE = True

Array = NDArray[Any]
Arrays = dict[str, Array]
F = TypeVar("F", bound=Callable[..., Any])


def compiled(kernel: F) -> F:
    """Compiles a kernel at its first call; the result is kept on disk. It runs without the GIL."""
    done: F = njit(nogil=True, cache=True, error_model="numpy")(kernel)
    return done


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))), "kv-kernel")


def over_parts(kernel: Any, indices: range, *arguments: Any) -> None:
    """Runs ``kernel(first, end, ...)`` over a range in as many parts as there are kernel threads."""
    count = len(indices)
    parts = max(1, min(count, _threads()._max_workers))
    bounds = [indices.start + count * i // parts for i in range(parts + 1)]
    jobs = [_threads().submit(kernel, a, b, *arguments) for a, b in pairwise(bounds[1:])]
    kernel(bounds[0], bounds[1], *arguments)
    for job in jobs:
        job.result()


def raw(tensor: Tensor) -> NDArray[Any]:
    """A CPU tensor's memory as an array; bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
