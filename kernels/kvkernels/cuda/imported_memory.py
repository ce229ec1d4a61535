"""Imported memory: ranges of another process's device memory that kernels may access.

Unmapping memory that a kernel uses destroys the process's CUDA context, so removal waits for the uses.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from kvkernels.chunk_payload import DeviceBytes

Reader = Callable[[int, int], memoryview]

# Two sessions of one process may import the same memory; CUDA then maps it once, at one address.
_ranges: dict[int, list[tuple[int, Reader]]] = {}
_changed = threading.Condition()
_num_uses = 0


def register_range(address: int, size_bytes: int, read: Reader) -> None:
    """Register a range as accessible, until ``unregister_range``. ``read(offset, size_bytes)`` copies to the host."""
    with _changed:
        _ranges.setdefault(address, []).append((size_bytes, read))


def unregister_range(address: int, unmap: Callable[[], object]) -> None:
    """Undo one ``register_range``: call ``unmap`` once no kernel uses the range. Without one, does nothing."""
    with _changed:
        _changed.wait_for(lambda: not _num_uses)
        if address in _ranges:
            _ranges[address].pop()
            if not _ranges[address]:
                del _ranges[address]
            unmap()


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """Keep all ranges mapped while the ``with`` block runs. The caller synchronizes the device before its end.

    Thread-safe.
    """
    global _num_uses
    with _changed:
        _num_uses += 1
    try:
        yield
    finally:
        with _changed:
            _num_uses -= 1
            _changed.notify_all()


def checked_address(payload: DeviceBytes) -> int:
    """Return a payload's address. Call it only inside ``in_use``. Raises ValueError for an unregistered range."""
    return _found(payload)[0]


def read_to_host(payload: DeviceBytes) -> memoryview:
    """Copy a payload to host memory. Raises ValueError if its range is not registered."""
    with in_use():
        address, start, read = _found(payload)
        return read(address - start, payload.size_bytes)


def _found(payload: DeviceBytes) -> tuple[int, int, Reader]:
    """Return a payload's address, and the start address and the read function of the range that contains it."""
    first, end = payload.address, payload.address + payload.size_bytes
    with _changed:
        for start, [(length, read), *_] in _ranges.items():
            if start <= first and end <= start + length:
                return first, start, read
    raise ValueError("the device memory of this payload was released: its session has ended")
