"""Copies tokens between a paged cache in host memory and arrays, on all cores.

See ``kernels/cpu/paged_copy.cpp``.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvkernels.cpu.cpu_library import Kernel, KernelLibrary
from kvkernels.cpu.thread_pool import PARALLEL_COPY_BYTES, num_own_threads

_Integers = NDArray[np.int64]


class _Job(ctypes.Structure):
    """``PagedCopyJob`` in jobs.h."""

    _fields_ = (
        ("next_item", ctypes.c_int64),
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("layers", "element_bytes", "block_tokens", "block_stride")),
        ("token", ctypes.c_void_p),
        ("head", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("channel", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("channels", "contiguous_channels")),
        ("slots", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("array", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("layer_stride", "token_stride", "head_stride", "channel_stride")),
    )


@cache
def _kernel(library: KernelLibrary, name: str) -> Kernel:
    return library.kernel(name, _Job)


def copy_tokens(
    library: KernelLibrary,
    name: str,
    addresses: _Integers,
    block: tuple[int, int],
    offsets: tuple[_Integers, _Integers, _Integers],
    slots: _Integers,
    array: NDArray[Any],
) -> None:
    """Copy tokens with the kernel ``paged_gather`` or ``paged_scatter``.

    It copies to or from ``array [layers, tokens, heads, channels]``, whose elements have 2 or 4 bytes.
    ``addresses [layers]`` are the addresses of the cache's memory. ``block`` is the number of tokens in a block, and
    the stride between blocks. ``offsets`` are the offsets of a block's tokens, of heads and of channels. The stride and
    the offsets are in elements. Releases the GIL.
    """
    addresses, token, head, channel, slots = (np.ascontiguousarray(x, np.int64) for x in (addresses, *offsets, slots))
    if array.shape != (len(addresses), len(slots), len(head), len(channel)):
        raise ValueError(
            f"the array is {array.shape}, not {len(addresses)} layers of {len(slots)} tokens, {len(head)} heads, "
            f"{len(channel)} channels"
        )
    strides = [stride // array.itemsize for stride in array.strides]
    job = _Job(
        0, addresses.ctypes.data, len(addresses), array.itemsize, *block,
        token.ctypes.data, head.ctypes.data, len(head), channel.ctypes.data, len(channel),
        int((np.diff(channel) == 1).all()), slots.ctypes.data, len(slots), array.ctypes.data, *strides,
    )  # fmt: skip
    _kernel(library, name).run_on_own_threads(job, num_own_threads() if array.nbytes >= PARALLEL_COPY_BYTES else 1)
