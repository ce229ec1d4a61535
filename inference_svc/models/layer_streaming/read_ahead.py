"""Read-ahead: a ring of memory slots that a thread fills with pieces of a file.

Steps need the pieces in order, and start again with the first piece after the last. The thread reads the next pieces
into unused slots. Slots are reference counted: while a piece is acquired, its slot is not overwritten. The thread
releases the GIL while it reads.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import structlog
from kvsidecar.errors import KVSidecarError

log = structlog.get_logger("model")

# Reads piece ``number`` into slot ``slot`` while the third argument returns True. Returns the number of bytes read.
Read = Callable[[int, int, Callable[[], bool]], int]
Poison = Callable[[int], None]


class WeightsUnreadable(KVSidecarError):
    """Weights could not be read from their file."""


@dataclass
class ReadAheadStats:
    """Counters since the start; nested acquisitions of the same piece do not count."""

    hits: int = 0  # pieces that were in memory when they were needed
    waits: int = 0  # pieces that were being read
    misses: int = 0  # pieces whose read had not begun
    bytes: int = 0
    read_seconds: float = 0.0
    wait_seconds: float = 0.0


class _State(enum.Enum):
    EMPTY = enum.auto()
    READING = enum.auto()
    READY = enum.auto()
    FAILED = enum.auto()


@dataclass(eq=False)
class _Slot:
    number: int
    piece: int = -1
    state: _State = _State.EMPTY
    uses: int = 0
    error: Exception | None = None


class ReadAhead:
    """Read-ahead of ``pieces`` pieces in ``slots`` slots. Thread-safe.

    The pieces acquired at one time must leave a slot free. ``poison`` is called with every released slot, whose piece
    is then read again. With ``poison``, tests prove that no released weight is used.
    """

    def __init__(self, pieces: int, slots: int, read: Read, poison: Poison | None = None) -> None:
        assert pieces > 0
        assert slots > 1
        self._pieces, self._read, self._poison = pieces, read, poison
        self._slots: Sequence[_Slot] = [_Slot(i) for i in range(slots)]
        self._at: dict[int, _Slot] = {}
        self._next = 0  # the piece in use, or the next to be used
        self._waited_for: list[int] = []
        self._stats = ReadAheadStats()
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="layers", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> ReadAheadStats:
        """Return a copy of the counters."""
        with self._changed:
            return replace(self._stats)

    def acquire(self, piece: int) -> int:
        """Wait for a piece and return its slot.

        The slot is valid until ``release`` has been called as often as ``acquire``. Raises WeightsUnreadable if the
        piece cannot be read now; another call tries again.
        """
        with self._changed:
            slot, self._next = self._at.get(piece), piece
            if slot is not None and slot.state is _State.FAILED:
                # The read-ahead failed, perhaps long ago, so try again now.
                self._empty(slot)
                slot = None
            if slot is not None and slot.state is _State.READY:
                self._stats.hits += not slot.uses
                self._changed.notify_all()
            else:
                if slot is None:
                    self._stats.misses += 1
                else:
                    self._stats.waits += 1
                slot = self._wait_for(piece)
            slot.uses += 1
            return slot.number

    def try_acquire(self, piece: int) -> int | None:
        """Return the slot of a piece if it is in memory. If not, return None and read the piece next."""
        with self._changed:
            slot, self._next = self._at.get(piece), piece
            self._changed.notify_all()
            if slot is None or slot.state is not _State.READY:
                return None
            self._stats.hits += not slot.uses
            slot.uses += 1
            return slot.number

    def release(self, piece: int) -> None:
        """Release one acquisition of a piece."""
        with self._changed:
            slot = self._at[piece]
            assert slot.uses > 0
            slot.uses -= 1
            if slot.uses:
                return
            self._next = (piece + 1) % self._pieces
            if self._poison is not None:
                self._poison(slot.number)
                self._empty(slot)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    # ---- under the lock -------------------------------------------------------------------------------------

    def _wait_for(self, piece: int) -> _Slot:
        began = time.perf_counter()
        self._waited_for.append(piece)
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._closed or self._is_loaded(piece))
        self._waited_for.remove(piece)
        self._stats.wait_seconds += time.perf_counter() - began
        slot = self._at.get(piece)
        if slot is None or slot.state is _State.READING:
            raise WeightsUnreadable("weights are no longer read: the worker is shutting down")
        if slot.state is _State.FAILED:
            error = slot.error
            self._empty(slot)
            raise WeightsUnreadable(f"weights could not be read from their file: {error}") from error
        return slot

    def _is_loaded(self, piece: int) -> bool:
        slot = self._at.get(piece)
        return slot is not None and slot.state in (_State.READY, _State.FAILED)

    def _wanted(self) -> list[int]:
        """Pieces that the slots should hold, the next one first."""
        circle = ((self._next + i) % self._pieces for i in range(min(len(self._slots), self._pieces)))
        return list(dict.fromkeys([*self._waited_for, *circle]))[: len(self._slots)]

    def _job(self) -> tuple[int, _Slot] | None:
        """The next piece to read, and its slot.

        A piece that a caller waits for may replace one that is read ahead: the caller may be the only one that can
        release the other slots.
        """
        wanted = self._wanted()
        missing = next((piece for piece in wanted if piece not in self._at), None)
        if missing is None:
            return None
        for slot in self._slots:
            if slot.state is _State.EMPTY:
                return missing, slot
            if not slot.uses and slot.state is not _State.READING and slot.piece not in wanted:
                self._empty(slot)
                return missing, slot
        idle = [s for s in self._slots if not s.uses and s.state is _State.READY and s.piece not in self._waited_for]
        if missing not in self._waited_for or not idle:
            return None
        last = max(idle, key=lambda slot: wanted.index(slot.piece))
        self._empty(last)
        return missing, last

    def _empty(self, slot: _Slot) -> None:
        del self._at[slot.piece]
        slot.piece, slot.state, slot.error = -1, _State.EMPTY, None

    # ---- the reading thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                job: tuple[int, _Slot] | None = None
                while not self._closed and (job := self._job()) is None:
                    self._changed.wait()
                if self._closed or job is None:
                    return
                piece, slot = job
                slot.piece, slot.state = piece, _State.READING
                self._at[piece] = slot
            self._fill(piece, slot)

    def _fill(self, piece: int, slot: _Slot) -> None:
        began, size, error, given_up = time.perf_counter(), 0, None, False

        def go_on() -> bool:
            # Final for all read threads: a piece that is needed again must not contain old bytes.
            nonlocal given_up
            if self._closed or piece not in self._wanted():
                given_up = True
            return not given_up

        try:
            size = self._read(piece, slot.number, go_on)
        except Exception as failure:  # reported to the caller that needs the piece
            error = failure
            log.warning("reading weights failed", piece=piece, error=str(failure))
        with self._changed:
            self._stats.bytes += size
            self._stats.read_seconds += time.perf_counter() - began
            if error is not None:
                slot.state, slot.error = _State.FAILED, error
            elif given_up:
                self._empty(slot)
            else:
                slot.state = _State.READY
            self._changed.notify_all()
