"""Host memory that the device addresses directly: the arena, registered with the CUDA driver (``cudaHostRegister``)."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import torch

_registered: dict[int, int] = {}
# Held while the device reads or writes registered memory: taking it away meanwhile would end the process's context.
_in_use = threading.Lock()


def _runtime() -> Any:
    cuda: Any = torch.cuda
    return cuda.cudart()


def address_of(view: memoryview) -> int:
    """Where a writable view's bytes lie."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def register(view: memoryview) -> bool:
    """Page-locks mapped memory for the device; False when the driver refuses, and copies go the long way. Idempotent.
    The mapping must stay until ``unregister``."""
    address = address_of(view)
    with _in_use:
        if address not in _registered and int(_runtime().cudaHostRegister(address, len(view), 0)) == 0:
            _registered[address] = len(view)
        return address in _registered


def unregister(address: int) -> None:
    """Gives memory back to the system's paging, once the device is done with it. Idempotent."""
    with _in_use:
        if _registered.pop(address, None) is not None:
            _runtime().cudaHostUnregister(address)


@contextlib.contextmanager
def using(view: memoryview) -> Iterator[int | None]:
    """The device's address of a view, valid until the end of the block, in which the caller waits for the device; None
    when the view is not in registered memory."""
    with _in_use:
        address = address_of(view)
        inside = any(a <= address and address + len(view) <= a + size for a, size in _registered.items())
        yield address if inside else None
