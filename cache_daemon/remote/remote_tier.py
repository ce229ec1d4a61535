"""The remote tier over an engine: finds chains of chunks, reads and writes them, and never says more than it checked.

Nothing here raises but RemoteFailed and Unfit, nothing waits longer than it is told to, and while the circuit is open
nothing waits at all. Runs on one event loop; what is heavy is the caller's to do on threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import structlog
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.durable.encryption import Seal
from cache_daemon.remote.backend import Item, RemoteBusy, RemoteEngine, RemoteFailed
from cache_daemon.remote.circuit_breaker import Breaker
from cache_daemon.remote.epoch_format import Marks, new_mark
from cache_daemon.remote.hedged_reads import Hedging
from cache_daemon.remote.key_schema import Names
from cache_daemon.remote.latency_model import Figures
from cache_daemon.remote.remote_record import MOST_PARTS, Entry, Unfit, decode_record, encode_record

# A call that had less time than this and did not make it says nothing about the engine.
_FAIR_SECONDS = 0.1
# A read is asked for again after so many times what it should take, and not before some milliseconds.
_LATE, _LATE_SECONDS = 3.0, 0.02
# Values of one call, so that no answer keeps the event loop busy.
_CALL_BYTES = 4 << 20
# A call that writes, or looks before it writes, has this long, and longer by its bytes.
_WRITE_SECONDS, _WRITE_BYTES_PER_SECOND = 2.0, 4e6
_PAGE, _MOST_SPOILT = 256, 1024
_TRIAL_SECONDS = 0.002
# Records that are checked before others have their turn on the event loop.
_SLICE = 32

T = TypeVar("T")
log = structlog.get_logger("cache_daemon")


@dataclass
class RemoteCounts:
    """Since the start."""

    failures: int = 0  # calls that failed or were not answered in time
    rejected: int = 0  # values that were not what they should have been
    read_bytes: int = 0
    written_bytes: int = 0
    written_chunks: int = 0


@dataclass(frozen=True)
class Found:
    """Chunks of a tenant that are there and sound, in the order asked; and the tenant's marks."""

    entries: list[Entry | None]
    marks: Marks

    @property
    def mark(self) -> bytes | None:
        """What sound values of the tenant carry; None while nothing counts."""
        return self.marks.value

    @property
    def leading(self) -> list[Entry]:
        """Those before the first that is missing."""
        out: list[Entry] = []
        for entry in self.entries:
            if entry is None:
                break
            out.append(entry)
        return out


@dataclass(frozen=True)
class Outgoing:
    """A chunk to write: its complete header, and its payload as it is stored."""

    header: ChunkHeader
    codec: int
    stored: memoryview
    checksum: int
    ttl_seconds: int | None
    mark: bytes


class RemoteTier:
    """See the module. ``seal`` protects values; the engine sees names, sizes and times alone."""

    def __init__(self, engine: RemoteEngine, names: Names, seal: Seal, clock: Callable[[], float] = time.time) -> None:
        self.engine, self.names, self.seal, self._clock = engine, names, seal, clock
        self.reads, self.writes = Breaker(), Breaker()
        self.figures, self.counts, self.hedging = Figures(), RemoteCounts(), Hedging(engine.lanes)
        self.asked = asyncio.Event()  # somebody wanted something that the circuit or the cost kept from going
        self.spoilt: dict[tuple[bytes, bytes], None] = {}  # roots and hashes of what is to be removed
        self.generation = 0  # counts times that the engine came back: it may have lost what it had

    # ---- reading --------------------------------------------------------------------------------------------

    async def find(self, root: bytes, hashes: Sequence[bytes], seconds: float) -> Found:
        """Which of a tenant's chunks are there, in one round trip. What fails its checks is missing, and counted.
        Raises RemoteFailed."""
        names = self.names
        wanted = [*self._marks_of(root), *(names.head(root, key) for key in hashes)]
        began = time.perf_counter()
        try:
            everything, tenant, chunks, *records = await self._read(
                lambda lane: self.engine.get_many(wanted, lane), seconds, 0
            )
        except RemoteFailed:
            self.figures.timed_out(min(time.perf_counter() - began, seconds))
            raise
        self.figures.looked(time.perf_counter() - began, sum(len(r or b"") for r in records))
        marks, entries = Marks(everything, tenant, chunks), list[Entry | None]()
        mark = marks.value
        for key, record in zip(hashes, records, strict=True):
            entries.append(self._entry(root, key, record, mark))
            if len(entries) % _SLICE == 0:
                await asyncio.sleep(0)
        return Found(entries, marks)

    def _marks_of(self, root: bytes) -> list[str]:
        return [self.names.mark, self.names.tenant_mark(root), self.names.chunks_mark(root)]

    async def marks(self, roots: Sequence[bytes]) -> list[Marks]:
        """The marks of some tenants, in one round trip. Raises RemoteFailed."""
        wanted = [self.names.mark, *(name for root in roots for name in self._marks_of(root)[1:])]
        everything, *found = await self._read(lambda lane: self.engine.get_many(wanted, lane), _WRITE_SECONDS, 0)
        return [Marks(everything, tenant, chunks) for tenant, chunks in zip(found[::2], found[1::2], strict=True)]

    async def mark_of_everything(self) -> bytes | None:
        """The mark of everything under the prefix. Raises RemoteFailed."""
        return (await self._read(lambda lane: self.engine.get_many([self.names.mark], lane), _WRITE_SECONDS, 0))[0]

    async def deletions(self) -> bytes | None:
        """A value that is another one after each deletion of anything. Raises RemoteFailed."""
        names = [self.names.deletions_mark]
        return (await self._read(lambda lane: self.engine.get_many(names, lane), _WRITE_SECONDS, 0))[0]

    def _entry(self, root: bytes, key: bytes, record: bytes | None, mark: bytes | None) -> Entry | None:
        if record is None or mark is None:
            return None
        try:
            entry = decode_record(self.seal, self.names.head(root, key), record)
            if entry.header.root != root or entry.header.prefix_hash != key:
                raise Unfit("it is another tenant's, or another chunk")
        except Unfit as error:
            self.reject(root, key, error)
            return None
        over = entry.ends_at and entry.ends_at <= self._clock()
        return None if over or entry.mark != mark else entry

    async def parts(self, entries: Sequence[Entry], seconds: float) -> list[list[bytes] | None]:
        """The parts of some entries' payloads, of a few megabytes together; None for one of which a part is missing, as
        when the engine has pushed it out. Raises RemoteFailed."""
        names = [self._parts_of(entry) for entry in entries]
        flat = [name for of_one in names for name in of_one]
        size = sum(entry.stored_length for entry in entries)
        tried_until = time.monotonic() + seconds
        # Of a look-up that has begun nothing is left out: it waits for the calls that try the engine.
        while self.reads.tried and time.monotonic() < tried_until:  # noqa: ASYNC110
            await asyncio.sleep(_TRIAL_SECONDS)
        found = await self._read(lambda lane: self.engine.get_many(flat, lane), seconds, size)
        values = iter(found)
        out: list[list[bytes] | None] = []
        for entry, of_one in zip(entries, names, strict=True):
            parts = [value for _, value in zip(of_one, values, strict=False) if value is not None]
            out.append(parts if len(parts) == entry.parts else None)
        self.counts.read_bytes += size
        return out

    def groups(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Entries in order, as many together as one call may bring: records may claim many parts of few bytes."""
        out: list[list[Entry]] = []
        size = parts = 0
        for entry in entries:
            if not out or size + entry.stored_length > _CALL_BYTES or parts + entry.parts > MOST_PARTS:
                out.append([])
                size = parts = 0
            out[-1].append(entry)
            size, parts = size + entry.stored_length, parts + entry.parts
        return out

    def _parts_of(self, entry: Entry) -> list[str]:
        header = entry.header
        return self.names.parts(header.root, header.prefix_hash, entry.stored_checksum, entry.parts)

    def left(self, entry: Entry) -> float:
        """Seconds that an entry has left; infinite without an end."""
        return entry.ends_at - self._clock() if entry.ends_at else inf

    def lasts(self, entry: Entry, ttl_seconds: int | None) -> bool:
        """Whether an entry has at least half of the time left that it would be given now."""
        left = self.left(entry)
        return left == inf or (ttl_seconds is not None and left > ttl_seconds / 2 - 1)

    def reject(self, root: bytes, key: bytes, error: Unfit) -> None:
        """Counts a value that is not what it should be. What is worth nothing to anybody is to be removed, or every
        look-up would come across it."""
        self.counts.rejected += 1
        if self.counts.rejected == 1:
            log.warning("a value of the remote tier is not what it should be; it is not used", why=str(error))
        if error.damaged:
            self.drop(root, key)

    def drop(self, root: bytes, key: bytes) -> None:
        """Notes a record that is to be removed."""
        if len(self.spoilt) < _MOST_SPOILT:
            self.spoilt[root, key] = None

    async def listed(self, root: bytes) -> list[bytes]:
        """The prefix hashes of a tenant's records, sound or not, in no order. Raises RemoteFailed."""
        found: dict[bytes, None] = {}
        async for page in self.scanned(self.names.tenant(root)):
            hashes = (self.names.hash_of_head(root, name) for name in page)
            found |= dict.fromkeys(key for key in hashes if key is not None)
        return list(found)

    # ---- writing --------------------------------------------------------------------------------------------

    async def store(self, batch: Sequence[Outgoing]) -> None:
        """Writes chunks, all payloads before any record. Raises RemoteFailed, after which some may be there."""
        parts: dict[int | None, list[Item]] = {}
        records: dict[int | None, list[Item]] = {}
        for out in batch:
            root, key, size = out.header.root, out.header.prefix_hash, self.engine.part_bytes
            cut = [out.stored[at : at + size] for at in range(0, len(out.stored), size)]
            names = self.names.parts(root, key, out.checksum, len(cut))
            parts.setdefault(out.ttl_seconds, []).extend(zip(names, cut, strict=True))
            ends = 0 if out.ttl_seconds is None else int(self._clock()) + out.ttl_seconds
            entry = Entry(out.header, out.codec, len(cut), len(out.stored), out.checksum, ends, out.mark)
            name = self.names.head(root, key)
            records.setdefault(out.ttl_seconds, []).append((name, encode_record(self.seal, name, entry)))
        for items_by_ttl in (parts, records):
            for ttl, items in items_by_ttl.items():
                for group in _grouped(items):
                    await self.write(group, ttl)
        self.counts.written_chunks += len(batch)
        self.counts.written_bytes += sum(len(out.stored) for out in batch)

    async def mark(self, root: bytes) -> None:
        """Gives a tenant a mark if it has none; of several nodes one wins. Raises RemoteFailed."""
        async with self._guarded(self.writes, _WRITE_SECONDS):
            await self.engine.put_if_absent(self.names.tenant_mark(root), new_mark(deletion=False))

    async def write(self, items: Sequence[Item], ttl_seconds: int | None) -> None:
        """Writes values of a few megabytes. Raises RemoteFailed."""
        size = sum(len(value) for _, value in items)
        async with self._guarded(self.writes, _WRITE_SECONDS + size / _WRITE_BYTES_PER_SECOND):
            await self.engine.put_many(items, ttl_seconds)

    # ---- deleting -------------------------------------------------------------------------------------------

    async def holds(self, root: bytes, key: bytes) -> bool:
        """Whether a chunk is there, in one round trip. Raises RemoteFailed."""
        return (await self.find(root, [key], _WRITE_SECONDS)).entries[0] is not None

    async def remove_spoilt(self) -> None:
        """Removes records that were rejected; their parts are found by nobody then. Raises RemoteFailed."""
        while self.spoilt:
            some = list(self.spoilt)[:_PAGE]
            await self.remove([self.names.head(root, key) for root, key in some])
            for gone in some:
                self.spoilt.pop(gone, None)

    async def scanned(self, prefix: str) -> AsyncIterator[list[str]]:
        """All names with a prefix, as the engine tells them. Raises RemoteFailed."""
        pages = aiter(self.engine.scan(prefix))
        while True:
            async with self._guarded(self.writes, _WRITE_SECONDS * 2):
                try:
                    page = await anext(pages)
                except StopAsyncIteration:
                    return
            yield page

    async def remove(self, names: Sequence[str]) -> None:
        """Removes values. Raises RemoteFailed."""
        for at in range(0, len(names), _PAGE):
            async with self._guarded(self.writes, _WRITE_SECONDS):
                await self.engine.delete_many(names[at : at + _PAGE])

    # ---- calls ----------------------------------------------------------------------------------------------

    async def _read(self, work: Callable[[int], Awaitable[T]], seconds: float, size: int) -> T:
        late = _LATE_SECONDS + _LATE * self.figures.seconds(size)
        async with self._guarded(self.reads, seconds):
            return await self.hedging.first(work, late)

    @asynccontextmanager
    async def _guarded(self, breaker: Breaker, seconds: float) -> AsyncIterator[None]:
        """A call behind a circuit, with a deadline. Raises RemoteFailed."""
        call, turn = breaker.enter(), breaker.opened
        if call is None:
            self.asked.set()
            raise RemoteBusy("it is being tried") if breaker.tried else RemoteFailed(breaker.why)
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            if seconds >= _FAIR_SECONDS:
                self._failed(breaker, turn, "it does not answer in time")
            raise RemoteFailed("it did not answer in time") from error
        except RemoteFailed as error:
            self._failed(breaker, turn, str(error))
            raise
        finally:
            breaker.leave(call)
        if breaker.opened == turn:
            breaker.succeeded()

    def _failed(self, breaker: Breaker, turn: int, why: str) -> None:
        """A call that began before the circuit last opened says nothing about the engine that has come back since."""
        self.counts.failures += 1
        if breaker.opened == turn and breaker.failed(why):
            self.asked.set()

    # ---- watching -------------------------------------------------------------------------------------------

    async def try_reading(self, seconds: float) -> None:
        """Asks the engine something small, past the circuit, and notes what it took. Raises RemoteFailed."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(seconds):
                await self.engine.get_many([self.names.mark])
        except TimeoutError as error:
            raise RemoteFailed("it does not answer in time") from error
        self.figures.looked(time.perf_counter() - began)

    async def try_writing(self, seconds: float) -> None:
        """Writes something small, past the circuit. Raises RemoteFailed."""
        try:
            async with asyncio.timeout(seconds):
                await self.engine.put_many([(f"{self.names.everything}probe", b"probe")], 60)
        except TimeoutError as error:
            raise RemoteFailed("it does not answer in time") from error


def _grouped(items: list[Item]) -> list[list[Item]]:
    """Values that are written at once: some megabytes."""
    out: list[list[Item]] = []
    size = 0
    for item in items:
        if not out or size + len(item[1]) > _CALL_BYTES:
            out.append([])
            size = 0
        out[-1].append(item)
        size += len(item[1])
    return out
