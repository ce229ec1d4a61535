"""Device-visible memory: the pinned host arena and imported device memory.

Unmapping memory that a kernel uses destroys the process's CUDA context, so use and removal share one lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from kvkernels.chunk_payload import DeviceBytes, Payload

_REGISTER_READ_ONLY = 0x08  # cudaHostRegisterReadOnly
_ranges: dict[int, int] = {}
_in_use = threading.Lock()


def address_of(payload: Payload) -> int:
    """Return the address of a payload's bytes."""
    if isinstance(payload, DeviceBytes):
        return payload.address
    return int(np.frombuffer(payload, np.uint8).ctypes.data)


def size_of(payload: Payload) -> int:
    return payload.size_bytes if isinstance(payload, DeviceBytes) else len(payload)


def register_range(address: int, size_bytes: int) -> None:
    """Register a range as device-visible, until ``unregister_range``."""
    with _in_use:
        _ranges[address] = size_bytes


def unregister_range(address: int, unmap: Callable[[], object]) -> None:
    """Remove a range by calling ``unmap`` once no kernel uses it. Idempotent."""
    with _in_use:
        if _ranges.pop(address, None) is not None:
            unmap()


def pin(view: memoryview) -> bool:
    """Page-lock mapped host memory for the device (``cudaHostRegister``); False if the driver refuses.

    Copies then go through torch. The mapping must stay until ``unpin``.
    """
    address = address_of(view)
    flags = _REGISTER_READ_ONLY if view.readonly else 0
    if int(_runtime().cudaHostRegister(address, len(view), flags)) != 0:
        return False
    register_range(address, len(view))
    return True


def unpin(address: int) -> None:
    """Undo ``pin``. Idempotent."""
    unregister_range(address, lambda: _runtime().cudaHostUnregister(address))


def _runtime() -> Any:
    cuda: Any = torch.cuda
    return cuda.cudart()


@contextlib.contextmanager
def device_address(payload: Payload) -> Iterator[int | None]:
    """Yield a payload's device address, valid inside the block, in which the caller synchronizes.

    Yields None for host memory that is not pinned. Raises ValueError for unregistered device memory.
    """
    with _in_use:
        address, size = address_of(payload), size_of(payload)
        inside = any(a <= address and address + size <= a + length for a, length in _ranges.items())
        if not inside and isinstance(payload, DeviceBytes):
            raise ValueError("the device memory of this payload was released: its session has ended")
        yield address if inside else None
