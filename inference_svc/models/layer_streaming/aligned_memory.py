"""Page-aligned memory for weights."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_HUGE = 2 << 20


def aligned_memory(size_bytes: int) -> Tensor:
    """Allocate page-aligned memory, uint8 ``[size_bytes]``, as huge pages if available.

    The system commits pages on the first write.
    """
    # Private: most systems give no huge pages to shared memory.
    pages = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=size_bytes) if size_bytes else torch.empty(0).byte()
