"""Pool memory on a CPU: zeroed tensors, whose pages a thread makes resident.

Zeroing gigabytes by writing takes seconds and would delay a worker's start. New memory of the system reads as zeros
without a write, so the tensors are usable at once. A thread makes the pages (of memory, not blocks) resident in the
background with madvise, which does not change their contents.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Sequence

import torch
from kvkernels.cpu import large_pages
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError

_POPULATE_WRITE = 23  # madvise(2), Linux 5.14
# Bytes per madvise call. A thread that maps or unmaps memory at the same time waits for at most one call.
_PIECE_BYTES = 8 << 20
# Up to this size the caller itself makes the pages resident, because a thread would save no time.
_AT_ONCE_BYTES = 32 << 20


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Creates a tensor of zeros in new memory without resident pages. Raises ConfigurationError."""
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = large_pages.allocate(size)
    except OSError as error:
        raise ConfigurationError(
            f"the system has no {format_size(size)} for half of the pool: {error.strerror}; lower --pool-bytes"
        ) from error
    return memory.view(dtype).view(*shape)


def populate(parts: Sequence[torch.Tensor]) -> threading.Thread | None:
    """Makes the pages of contiguous tensors resident, and keeps their contents.

    Returns the thread that makes the pages resident. Returns None if the pages are resident already: this holds for
    small tensors, and on systems without MADV_POPULATE_WRITE. Such systems need a write, so the tensors are zeroed.
    """
    if not _made(parts[0], 1):
        for part in parts:
            part.zero_()
        return None
    if sum(part.nbytes for part in parts) <= _AT_ONCE_BYTES:
        _make(parts)
        return None
    thread = threading.Thread(target=_make, args=(parts,), name="pool-pages", daemon=True)
    thread.start()
    return thread


def _make(parts: Sequence[torch.Tensor]) -> None:
    for part in parts:
        if not _made(part, part.nbytes):  # out of memory: the first write to these pages will report it
            return


def _made(part: torch.Tensor, size: int) -> bool:
    """Makes the pages of a tensor's first ``size`` bytes resident, without the GIL. False if the system refuses."""
    first = part.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = part.data_ptr() + size
    for at in range(first, end, _PIECE_BYTES):
        length = min(_PIECE_BYTES, end - at)
        if _libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(length), _POPULATE_WRITE):
            return False
    return True


_libc = ctypes.CDLL(None, use_errno=True)
