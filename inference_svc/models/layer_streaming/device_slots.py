"""Device slots: layers are copied from pinned memory into a ring of device memory before they are needed.

A copy stream fills slots while the engine's stream computes. Two events order the streams: a layer's computation
waits for the copy's ``ready``, and the next copy into the slot waits for the computation's ``free``. The host waits for
neither event. After the last layer, the first layers are copied again, so that the next step finds them in their slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvkernels.device.device_port import Device, Event
from torch import Tensor

from inference_svc.models.layer_streaming.pinned_pieces import PinnedPieces
from inference_svc.models.layer_streaming.read_ahead import ReadAheadStats

POISON = 0xFF  # repeated, these bytes are NaN as a float and as the scale of a quantized weight


@dataclass(eq=False)
class _Slot:
    number: int
    memory: Tensor
    piece: int = -1
    uses: int = 0
    ready: Event | None = None  # occurs after the last copy into the slot
    free: Event | None = None  # occurs after the last use of the slot


class DeviceSlots:
    """Pieces of weights in device memory ``slots``, copied from ``pieces``. For one computing thread.

    As in ``ReadAhead``, the pieces acquired at one time must be fewer than the slots. With ``poison``, a slot is
    overwritten after its last use, and its piece is then copied again.
    """

    def __init__(self, device: Device, pieces: PinnedPieces, slots: Sequence[Tensor], poison: bool = False) -> None:
        assert len(slots) > 1
        self._device, self._pieces, self._poison = device, pieces, poison
        self._slots = [_Slot(i, memory) for i, memory in enumerate(slots)]
        self._at: dict[int, _Slot] = {}
        self._copies = device.stream()
        self._copied: deque[tuple[Event, int]] = deque()  # pieces from which copies may still read, oldest first
        self._next = 0  # the piece in use, or the next to be used
        self._stats = ReadAheadStats()

    @property
    def stats(self) -> ReadAheadStats:
        """Return a copy of the counters: a hit is a piece whose copy had been enqueued when it was needed."""
        host = self._pieces.stats
        return replace(self._stats, waits=host.misses + host.waits, wait_seconds=host.wait_seconds)

    def acquire(self, piece: int) -> int:
        """Return the slot of a piece. Work that is enqueued on the current stream after this call finds the weights.

        The slot is valid until ``release`` has been called as often as ``acquire``. Raises WeightsUnreadable.
        """
        self._next = piece
        slot = self._at.get(piece)
        if slot is None:
            self._stats.misses += 1
            slot = self._fill(piece, wait=True)
        else:
            self._stats.hits += not slot.uses
        assert slot is not None
        if not slot.uses:
            assert slot.ready is not None
            self._device.current_stream().wait(slot.ready)
        slot.uses += 1
        self._prefetch()
        return slot.number

    def release(self, piece: int) -> None:
        """Release one acquisition of a piece. Call it after the work that uses the piece is enqueued."""
        slot = self._at[piece]
        assert slot.uses > 0
        slot.uses -= 1
        if slot.uses:
            return
        self._next = (piece + 1) % self._pieces.count
        stream, slot.free = self._device.current_stream(), self._device.event()
        if self._poison:
            stream.fill(slot.memory, POISON)
            self._empty(slot)
        slot.free.record(stream)
        self._prefetch()

    def close(self) -> None:
        """Stop reading; later calls fail. Idempotent."""
        self._copies.synchronize()
        self._pieces.close()

    def _prefetch(self) -> None:
        """Enqueue copies of the next pieces while slots are free and the pieces are in host memory."""
        self._let_go(len(self._copied))
        for piece in self._wanted():
            if piece not in self._at and self._fill(piece, wait=False) is None:
                return

    def _wanted(self) -> list[int]:
        """Pieces that the slots should hold, the next one first."""
        count = self._pieces.count
        return [(self._next + i) % count for i in range(min(len(self._slots), count))]

    def _fill(self, piece: int, wait: bool) -> _Slot | None:
        """Enqueue the copy of a piece. None if no slot is free, or the piece is not in host memory yet."""
        wanted = self._wanted()
        slot = next((s for s in self._slots if s.piece < 0), None)
        slot = slot or next((s for s in self._slots if not s.uses and s.piece not in wanted), None)
        if slot is None:
            return None
        if wait:
            while len(self._copied) >= self._pieces.max_held:
                self._copied[0][0].synchronize()
                self._let_go(1)
        elif len(self._copied) >= self._pieces.max_held:
            return None
        source = self._pieces.acquire(piece) if wait else self._pieces.try_acquire(piece)
        if source is None:
            return None
        if slot.piece >= 0:
            self._empty(slot)
        if slot.free is not None:
            self._copies.wait(slot.free)
        self._copies.copy(slot.memory[: len(source)], source)
        slot.piece, slot.ready = piece, self._device.event()
        slot.ready.record(self._copies)
        self._at[piece] = slot
        self._copied.append((slot.ready, piece))
        self._stats.bytes += len(source)
        return slot

    def _let_go(self, most: int) -> None:
        """Release up to ``most`` pieces whose copies are done."""
        for _ in range(most):
            ready, piece = self._copied[0]
            if not ready.query():
                return
            self._copied.popleft()
            self._pieces.release(piece)

    def _empty(self, slot: _Slot) -> None:
        del self._at[slot.piece]
        slot.piece = -1
