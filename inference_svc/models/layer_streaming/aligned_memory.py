"""Memory that weights are read into."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_HUGE = 2 << 20


def aligned_memory(size_bytes: int) -> Tensor:
    """Memory that begins at a page, uint8 ``[size_bytes]``; as large pages where the system gives some. It is taken as
    it is written to."""
    # Private: of shared memory most systems give no large pages.
    pages = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8, count=size_bytes) if size_bytes else torch.empty(0).byte()
