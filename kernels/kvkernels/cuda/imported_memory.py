"""Imported memory: ranges of another process's device memory that kernels may access.

Unmapping memory that a kernel uses destroys the process's CUDA context, so use and removal share one lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from kvkernels.chunk_payload import DeviceBytes

_ranges: dict[int, int] = {}
_in_use = threading.Lock()


def register_range(address: int, size_bytes: int) -> None:
    """Register a range as accessible, until ``unregister_range``."""
    with _in_use:
        _ranges[address] = size_bytes


def unregister_range(address: int, unmap: Callable[[], object]) -> None:
    """Remove a range by calling ``unmap`` once no kernel uses it. Idempotent."""
    with _in_use:
        if _ranges.pop(address, None) is not None:
            unmap()


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """Keep all ranges mapped during the block, in which the caller synchronizes."""
    with _in_use:
        yield


def checked_address(payload: DeviceBytes) -> int:
    """Return a payload's address, within ``in_use``. Raises ValueError if its range is not registered."""
    first, end = payload.address, payload.address + payload.size_bytes
    if not any(start <= first and end <= start + length for start, length in _ranges.items()):
        raise ValueError("the device memory of this payload was released: its session has ended")
    return first
