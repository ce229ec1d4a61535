"""Pinned pieces: weights in page-locked host memory, from which a device copies them.

Either all streamed weights stay pinned, or a thread fills a pinned ring from the layer file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from kvkernels.device.device_port import Device
from torch import Tensor

from inference_svc.models.layer_streaming.read_ahead import ReadAhead, ReadAheadStats

# Reads piece ``number`` into host memory while the third argument returns True. Returns the number of bytes read.
ReadPiece = Callable[[int, Tensor, Callable[[], bool]], int]


def locked_bytes(size_bytes: int) -> int:
    """Return the host memory that a pinned piece takes: torch rounds it up to a power of two."""
    return 1 << (size_bytes - 1).bit_length()


class PinnedPieces(Protocol):
    """Source of pieces ``0`` to ``count - 1``, uint8. At most ``max_held`` may be acquired at one time."""

    count: int
    max_held: int

    @property
    def stats(self) -> ReadAheadStats: ...

    def acquire(self, piece: int) -> Tensor:
        """Wait for a piece and return it in pinned memory, valid until ``release``. Raises WeightsUnreadable."""
        ...

    def try_acquire(self, piece: int) -> Tensor | None:
        """Return a piece like ``acquire``, or None if ``acquire`` would wait."""
        ...

    def release(self, piece: int) -> None:
        """Release one acquisition, after the device has read the piece."""
        ...

    def close(self) -> None: ...


class ResidentPieces:
    """Pieces that all stay in pinned memory, read once."""

    def __init__(self, device: Device, sizes: Sequence[int], read: ReadPiece) -> None:
        """Raises OSError if a piece cannot be read."""
        self.count, self.max_held = len(sizes), sys.maxsize
        self.stats = ReadAheadStats()
        self._pieces = [device.pinned(size) for size in sizes]
        for number, memory in enumerate(self._pieces):
            device.check_host_access(memory, write=True)
            read(number, memory, lambda: True)

    def acquire(self, piece: int) -> Tensor:
        return self._pieces[piece]

    def try_acquire(self, piece: int) -> Tensor | None:
        return self._pieces[piece]

    def release(self, piece: int) -> None:
        return

    def close(self) -> None:
        return


class RingPieces:
    """Pieces that a thread reads ahead into a ring of pinned memory."""

    def __init__(self, device: Device, sizes: Sequence[int], slots: int, read: ReadPiece) -> None:
        self.count, self.max_held, self._sizes = len(sizes), slots - 1, sizes
        self._slots = [device.pinned(max(sizes)) for _ in range(slots)]

        def fill(number: int, slot: int, go_on: Callable[[], bool]) -> int:
            memory = self._slots[slot][: sizes[number]]
            device.check_host_access(memory, write=True)
            return read(number, memory, go_on)

        self._ahead = ReadAhead(len(sizes), slots, fill)

    @property
    def stats(self) -> ReadAheadStats:
        return self._ahead.stats

    def acquire(self, piece: int) -> Tensor:
        return self._slots[self._ahead.acquire(piece)][: self._sizes[piece]]

    def try_acquire(self, piece: int) -> Tensor | None:
        slot = self._ahead.try_acquire(piece)
        return None if slot is None else self._slots[slot][: self._sizes[piece]]

    def release(self, piece: int) -> None:
        self._ahead.release(piece)

    def close(self) -> None:
        self._ahead.close()
