"""Memory that the device addresses: the host arena, registered with the driver, and imported device memory.

Memory that is taken away while a kernel uses it ends the process's CUDA context; so it is used and given up under one
lock.
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
    """Where a payload's bytes lie."""
    if isinstance(payload, DeviceBytes):
        return payload.address
    return int(np.frombuffer(payload, np.uint8).ctypes.data)


def size_of(payload: Payload) -> int:
    return payload.size_bytes if isinstance(payload, DeviceBytes) else len(payload)


def adopt(address: int, size_bytes: int) -> None:
    """Says that the device addresses a range, until ``give_up``."""
    with _in_use:
        _ranges[address] = size_bytes


def give_up(address: int, how: Callable[[], object]) -> None:
    """Takes a range away by calling ``how``, once nobody uses it. Idempotent."""
    with _in_use:
        if _ranges.pop(address, None) is not None:
            how()


def pin(view: memoryview) -> bool:
    """Page-locks mapped host memory for the device (``cudaHostRegister``); False when the driver refuses, and copies go
    the long way. The mapping must stay until ``unpin``."""
    address = address_of(view)
    flags = _REGISTER_READ_ONLY if view.readonly else 0
    if int(_runtime().cudaHostRegister(address, len(view), flags)) != 0:
        return False
    adopt(address, len(view))
    return True


def unpin(address: int) -> None:
    """Gives pinned memory back to the system's paging. Idempotent."""
    give_up(address, lambda: _runtime().cudaHostUnregister(address))


def _runtime() -> Any:
    cuda: Any = torch.cuda
    return cuda.cudart()


@contextlib.contextmanager
def using(payload: Payload) -> Iterator[int | None]:
    """The device's address of a payload, valid until the end of the block, in which the caller waits for the device.
    None when it lies in host memory that was not pinned. Raises ValueError for device memory that was given up."""
    with _in_use:
        address, size = address_of(payload), size_of(payload)
        inside = any(a <= address and address + size <= a + length for a, length in _ranges.items())
        if not inside and isinstance(payload, DeviceBytes):
            raise ValueError("the device memory of this payload was given up: its session has ended")
        yield address if inside else None
