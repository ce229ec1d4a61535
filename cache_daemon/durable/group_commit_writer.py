"""Group commit writer: the thread that writes many chunks per transaction.

Calls keep their order: a later call wins. The writer retries removals and notes with growing backoff until they
succeed, before it writes anything newer. It does not retry chunks: their owner gets the outcome and decides.

A removal enters the next transaction, before all queued chunks. That keeps the order of calls, because ``remove``
cancels a queued chunk of the same name. Notes never reach the disk before a removal that was requested earlier.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.durable.durable_tier import (
    DurableTier,
    OutOfSpace,
    Put,
    PutOutcome,
    PutResult,
    TierFailed,
    WriteGroup,
)

log = structlog.get_logger("cache_daemon")
Done = Callable[[PutResult], None]
_STORED, _FAILED, _CANCELLED = (PutResult(o) for o in (PutOutcome.STORED, PutOutcome.FAILED, PutOutcome.CANCELLED))
_GROUP_BYTES = 32 << 20
_GROUP_ITEMS = 256
_GROUP_REMOVALS = 4096
# A transaction that takes longer counts as a hung disk.
HUNG_SECONDS = 10.0
_MIN_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.1, 5.0


@dataclass(eq=False)
class _Put:
    header: ChunkHeader
    payload: Callable[[], memoryview]
    replaces: tuple[bytes, ...]
    last_use: Callable[[], int]
    done: Done
    cancelled: bool = False


@dataclass
class _PendingMetadata:
    """Removals, notes and recency that are kept until they are applied."""

    remove: dict[bytes, None] = field(default_factory=dict)
    notes: dict[bytes, bytes | None] = field(default_factory=dict)
    used: dict[bytes, int] = field(default_factory=dict)
    waiting: list[Done] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.remove or self.notes or self.used or self.waiting)

    def group(self, put: tuple[Put, ...], used: Mapping[bytes, int]) -> WriteGroup:
        return WriteGroup(tuple(self.remove), put, dict(self.notes), {**self.used, **used})


class GroupCommitWriter:
    """Writes to a durable tier on its own thread.

    All methods and every ``done`` run on the event loop. ``failing`` and the outcomes report a failure of the tier.
    """

    def __init__(self, tier: DurableTier, loop: asyncio.AbstractEventLoop) -> None:
        self._tier, self._loop = tier, loop
        self._queue: deque[_Put] = deque()
        self._removals: deque[bytes] = deque()
        self._puts: dict[bytes, list[_Put]] = {}
        self._next = _PendingMetadata()
        self._unflushed = _PendingMetadata()
        self._unanswered: dict[_Put, None] = {}
        self._wake = threading.Condition()
        self._stop_at: float | None = None
        self._failing: tuple[str, float] | None = None
        self._began: float | None = None  # start of the running transaction
        self.transactions = 0  # successful transactions
        self._backoff_seconds = 0.0
        self._outcomes: list[tuple[Done, PutResult]] = []
        self._thread = threading.Thread(target=self._run, name="durable-writer", daemon=True)
        self._thread.start()

    # ---- on the event loop ---------------------------------------------------------------------------------

    def put(
        self, header: ChunkHeader, payload: Callable[[], memoryview], replaces: Iterable[bytes],
        last_use: Callable[[], int], done: Done,
    ) -> None:  # fmt: skip
        """Store a chunk and its last use, and remove the chunks that it replaces.

        This is one transaction. The writer's thread calls ``payload`` and ``last_use``, and releases the payload's
        view. The payload must not change until ``done``. After CANCELLED, the chunks to be replaced are still stored.
        """
        item = _Put(header, payload, tuple(replaces), last_use, done)
        with self._wake:
            self._queue.append(item)
            self._puts.setdefault(header.prefix_hash, []).append(item)
            self._wake.notify()

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove stored chunks, and cancel queued chunks of the same names."""
        with self._wake:
            for key in keys:
                for item in self._puts.pop(key, ()):
                    item.cancelled = True
                    self._loop.call_soon(item.done, _CANCELLED)
                self._removals.append(key)
            self._wake.notify()

    def flush(self, done: Done) -> None:
        """Call ``done`` with STORED once all earlier removals and notes are on disk; with FAILED if a write fails.

        Takes no longer than the running transaction and the next one.
        """
        with self._wake:
            if self._removals or self._next or self._unflushed:
                self._next.waiting.append(done)
                self._wake.notify()
            else:
                self._loop.call_soon(done, _STORED)

    def note(self, name: bytes, value: bytes | None, done: Done | None = None) -> None:
        """Store a small value; None removes it. ``done`` gets STORED, or FAILED if the writer must retry."""
        with self._wake:
            self._next.notes[name] = value
            if done is not None:
                self._next.waiting.append(done)
            self._wake.notify()

    def used(self, ticks: Mapping[bytes, int]) -> None:
        """Store when chunks were last used."""
        with self._wake:
            self._next.used.update(ticks)
            self._wake.notify()

    @property
    def pending(self) -> int:
        """Number of chunks that are queued or being written."""
        with self._wake:
            return sum(map(len, self._puts.values())) + len(self._unanswered)

    def fail_queued(self) -> int:
        """Fail all queued chunks, except those that are being written. Returns the number of failed chunks."""
        with self._wake:
            items = [item for item in self._queue if not item.cancelled]
            self._queue.clear()
            for item in items:
                item.cancelled = True
                self._forget(item)
                self._loop.call_soon(item.done, _FAILED)
        return len(items)

    @property
    def failing(self) -> tuple[str, float] | None:
        """Reason and start (monotonic) of the current failure; None when writes succeed."""
        began = self._began
        if began is not None and self.hung:
            return f"the disk hangs: a write has taken more than {HUNG_SECONDS:g} s", began
        return self._failing

    @property
    def hung(self) -> bool:
        """True while the running transaction exceeds its time limit."""
        began = self._began
        return began is not None and time.monotonic() - began > HUNG_SECONDS

    def stop(self, timeout: float) -> bool:
        """Write all queued changes, then end the thread; False on timeout. Blocks."""
        with self._wake:
            self._stop_at = time.monotonic() + timeout
            self._wake.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive() and not (self._unflushed or self._queue or self._removals)

    # ---- on the writer's thread ----------------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            items = self._take()
            if items is None:
                return
            try:
                self._write(items)
            except Exception as error:  # one bad group must not end the thread
                self._note_failure(error)
                self._after_metadata_failed()
                self._answer(list(self._unanswered), _FAILED)
            del items  # the payload must not stay referenced while the thread waits for the next group
            self._deliver()

    def _take(self) -> list[_Put] | None:
        """Take the next group's chunks, and add its removals and notes; None when the thread must end."""
        with self._wake:
            while not self._has_work():
                if self._stop_at is not None:
                    return None
                self._wake.wait()
            if self._backoff_seconds:
                self._wait_out_backoff()
                if self._stop_at is not None and time.monotonic() >= self._stop_at:
                    return None
            while self._removals and len(self._unflushed.remove) < _GROUP_REMOVALS:
                self._unflushed.remove[self._removals.popleft()] = None
            items: list[_Put] = []
            self._unanswered = {}
            if self._removals:
                return items  # removals come first
            size = count = 0
            while self._queue and count < _GROUP_ITEMS and size < _GROUP_BYTES:
                item = self._queue.popleft()
                count += 1
                if not item.cancelled:
                    size += item.header.payload_bytes
                    items.append(item)
                    self._forget(item)
            fresh, self._next = self._next, _PendingMetadata()
            self._unflushed.notes.update(fresh.notes)
            self._unflushed.used.update(fresh.used)
            self._unflushed.waiting += fresh.waiting
            self._unanswered = dict.fromkeys(items)
            return items

    def _has_work(self) -> bool:
        return bool(self._removals or self._queue or self._next or self._unflushed)

    def _wait_out_backoff(self) -> None:
        until = time.monotonic() + self._backoff_seconds
        if self._stop_at is not None:
            until = min(until, self._stop_at)
        while (left := until - time.monotonic()) > 0:
            was_stopping = self._stop_at is not None
            self._wake.wait(left)
            if self._stop_at is not None and not was_stopping:
                return  # ``stop`` was called: retry at once

    def _forget(self, item: _Put) -> None:
        waiting = self._puts.get(item.header.prefix_hash, [])
        if item in waiting:
            waiting.remove(item)
        if not waiting:
            self._puts.pop(item.header.prefix_hash, None)

    def _write(self, items: list[_Put]) -> None:
        ready = self._with_payloads(items)
        try:
            self._write_ready(ready)
        finally:
            for _, put in ready:
                with contextlib.suppress(BufferError):
                    put.payload.release()

    def _with_payloads(self, items: Sequence[_Put]) -> list[tuple[_Put, Put]]:
        ready = []
        for item in items:
            try:
                ready.append((item, Put(item.header, item.payload(), item.replaces)))
            except Exception as error:
                log.warning("a chunk's payload cannot be read", error=str(error))
                self._answer([item], _FAILED)
        return ready

    def _write_ready(self, ready: list[tuple[_Put, Put]]) -> None:
        """Write the group; if that fails, write metadata first and then ever smaller groups."""
        try:
            self._apply(ready)
        except Exception as error:
            self._note_failure(error)
            if len(ready) == 0 and not isinstance(error, OutOfSpace):
                self._after_metadata_failed()
                return
            if not self._write_metadata():
                self._answer([item for item, _ in ready], _outcome_of(error))
                return
            self._write_parts(ready, error)

    def _write_metadata(self, *, in_halves: bool = True) -> bool:
        """Write removals, notes and recency alone, removals in parts if space is short."""
        try:
            self._apply([])
            return True
        except Exception as error:
            self._note_failure(error)
            if in_halves and isinstance(error, OutOfSpace) and self._remove_in_halves(list(self._unflushed.remove)):
                return self._write_metadata(in_halves=False)
        self._after_metadata_failed()
        return False

    def _remove_in_halves(self, names: list[bytes]) -> bool:
        """Remove in ever smaller transactions; False when not even one removal succeeds."""
        if not names:
            return True
        try:
            self._transact(WriteGroup(tuple(names)))
        except Exception as error:
            self._note_failure(error)
            if len(names) == 1 or not isinstance(error, OutOfSpace):
                return False
            middle = len(names) // 2
            return self._remove_in_halves(names[:middle]) and self._remove_in_halves(names[middle:])
        for name in names:
            del self._unflushed.remove[name]
        return True

    def _after_metadata_failed(self) -> None:
        for done in self._unflushed.waiting:
            self._outcomes.append((done, _FAILED))
        self._unflushed.waiting.clear()
        self._backoff_seconds = min(_MAX_BACKOFF_SECONDS, self._backoff_seconds * 2 or _MIN_BACKOFF_SECONDS)

    def _write_parts(self, ready: list[tuple[_Put, Put]], error: Exception) -> None:
        """Write a failed group of chunks in halves, to isolate a bad chunk.

        If the tier failed, try the whole group once more first, since the tier may have reopened its file. Stops at the
        first chunk without space: the next chunk would be written out of order, and its owner must free space first.
        """
        waiting = [ready] if isinstance(error, TierFailed) else _halves(ready)
        while waiting:
            part = waiting.pop()
            try:
                self._apply(part)
            except Exception as again:
                self._note_failure(again)
                is_one = len(part) == 1
                if isinstance(again, TierFailed) or (isinstance(again, OutOfSpace) and is_one):
                    for left in (part, *waiting):
                        self._answer([item for item, _ in left], _outcome_of(again))
                    return
                if is_one:
                    self._answer([part[0][0]], _FAILED)
                else:
                    waiting += _halves(part)

    def _apply(self, part: Sequence[tuple[_Put, Put]]) -> None:
        """Write chunks and unflushed metadata in one transaction. Raises the tier's errors."""
        if not part and not self._unflushed:
            return
        used = {item.header.prefix_hash: item.last_use() for item, _ in part}
        results = self._transact(self._unflushed.group(tuple(put for _, put in part), used))
        for (item, _), result in zip(part, results, strict=True):
            self._answer([item], result)
        self._outcomes += [(done, _STORED) for done in self._unflushed.waiting]
        self._unflushed = _PendingMetadata()
        self._backoff_seconds = 0.0
        self._failing = None
        self.transactions += 1

    def _transact(self, group: WriteGroup) -> list[PutResult]:
        self._began = time.monotonic()
        try:
            return self._tier.apply(group)
        finally:
            self._began = None

    def _note_failure(self, error: Exception) -> None:
        since = self._failing[1] if self._failing else time.monotonic()
        if self._failing is None:
            log.warning("durable writes fail", error=str(error) or type(error).__name__)
        self._failing = (str(error) or type(error).__name__, since)

    def _answer(self, items: Iterable[_Put], outcome: PutResult) -> None:
        with self._wake:
            for item in items:
                if item in self._unanswered:
                    del self._unanswered[item]
                    self._outcomes.append((item.done, outcome))

    def _deliver(self) -> None:
        """Deliver all outcomes of a group in one call on the loop."""
        outcomes, self._outcomes = self._outcomes, []
        if outcomes and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop closed meanwhile
                self._loop.call_soon_threadsafe(_call_all, outcomes)


def _halves(ready: list[tuple[_Put, Put]]) -> list[list[tuple[_Put, Put]]]:
    """Return both halves, the second first: the list is used as a stack."""
    middle = len(ready) // 2
    return [ready[middle:], ready[:middle]] if middle else [ready]


def _outcome_of(error: Exception) -> PutResult:
    return PutResult(PutOutcome.OUT_OF_SPACE) if isinstance(error, OutOfSpace) else _FAILED


def _call_all(outcomes: Sequence[tuple[Done, PutResult]]) -> None:
    for done, outcome in outcomes:
        try:
            done(outcome)
        except Exception:  # the other callbacks must still run
            log.exception("callback of a durable write failed", outcome=outcome.outcome.value)
