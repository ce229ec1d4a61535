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

from cache_daemon.durable.encryption import Cipher
from cache_daemon.remote.backend import Item, RemoteBackend, RemoteBusy, RemoteFailed
from cache_daemon.remote.circuit_breaker import CircuitBreaker
from cache_daemon.remote.epoch_format import TenantEpochs, new_epoch
from cache_daemon.remote.hedged_reads import HedgedReads
from cache_daemon.remote.key_schema import KeySchema
from cache_daemon.remote.latency_model import LatencyModel
from cache_daemon.remote.remote_record import MAX_PARTS, InvalidRecord, RemoteRecord, decode_record, encode_record

# A call that had less time than this and did not make it says nothing about the engine.
_MIN_MEANINGFUL_SECONDS = 0.1
# A read is asked for again after so many times what it should take, and not before some milliseconds.
_HEDGE_FACTOR, _MIN_HEDGE_SECONDS = 3.0, 0.02
# Values of one call, so that no answer keeps the event loop busy.
_CALL_BYTES = 4 << 20
# A call that writes, or looks before it writes, has this long, and longer by its bytes.
_WRITE_SECONDS, _WRITE_BYTES_PER_SECOND = 2.0, 4e6
_PAGE, _MAX_CORRUPT_RECORDS = 256, 1024
_TRIAL_SECONDS = 0.002
# Records that are checked before others have their turn on the event loop.
_RECORDS_PER_SLICE = 32

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
class RecordLookup:
    """Chunks of a tenant that are there and sound, in the order asked; and the tenant's marks."""

    records: list[RemoteRecord | None]
    epochs: TenantEpochs

    @property
    def record_epoch(self) -> bytes | None:
        """What sound values of the tenant carry; None while nothing counts."""
        return self.epochs.record_epoch

    @property
    def leading(self) -> list[RemoteRecord]:
        """Those before the first that is missing."""
        out: list[RemoteRecord] = []
        for entry in self.records:
            if entry is None:
                break
            out.append(entry)
        return out


@dataclass(frozen=True)
class EncodedChunk:
    """A chunk to write: its complete header, and its payload as it is stored."""

    header: ChunkHeader
    codec: int
    stored: memoryview
    checksum: int
    ttl_seconds: int | None
    epoch: bytes


class RemoteTier:
    """See the module. ``seal`` protects values; the engine sees names, sizes and times alone."""

    def __init__(
        self, backend: RemoteBackend, key_schema: KeySchema, cipher: Cipher, clock: Callable[[], float] = time.time
    ) -> None:
        self.backend, self.key_schema, self.cipher, self._clock = backend, key_schema, cipher, clock
        self.reads, self.writes = CircuitBreaker(), CircuitBreaker()
        self.latency, self.counters, self.hedged_reads = LatencyModel(), RemoteCounts(), HedgedReads(backend.lanes)
        self.demand = asyncio.Event()  # somebody wanted something that the circuit or the cost kept from going
        self.corrupt_records: dict[tuple[bytes, bytes], None] = {}  # roots and hashes of what is to be removed
        self.backend_generation = 0  # counts times that the engine came back: it may have lost what it had

    # ---- reading --------------------------------------------------------------------------------------------

    async def find(self, root: bytes, hashes: Sequence[bytes], seconds: float) -> RecordLookup:
        """Which of a tenant's chunks are there, in one round trip. What fails its checks is missing, and counted.
        Raises RemoteFailed."""
        names = self.key_schema
        wanted = [*self._epoch_keys(root), *(names.record_key(root, key) for key in hashes)]
        began = time.perf_counter()
        try:
            everything, tenant, chunks, *records = await self._read(
                lambda lane: self.backend.get_many(wanted, lane), seconds, 0
            )
        except RemoteFailed:
            self.latency.record_timeout(min(time.perf_counter() - began, seconds))
            raise
        self.latency.record_round_trip(time.perf_counter() - began, sum(len(r or b"") for r in records))
        marks, entries = TenantEpochs(everything, tenant, chunks), list[RemoteRecord | None]()
        mark = marks.record_epoch
        for key, record in zip(hashes, records, strict=True):
            entries.append(self._decode(root, key, record, mark))
            if len(entries) % _RECORDS_PER_SLICE == 0:
                await asyncio.sleep(0)
        return RecordLookup(entries, marks)

    def _epoch_keys(self, root: bytes) -> list[str]:
        return [
            self.key_schema.global_epoch_key,
            self.key_schema.tenant_epoch_key(root),
            self.key_schema.chunks_epoch_key(root),
        ]

    async def read_epochs(self, roots: Sequence[bytes]) -> list[TenantEpochs]:
        """The marks of some tenants, in one round trip. Raises RemoteFailed."""
        wanted = [self.key_schema.global_epoch_key, *(name for root in roots for name in self._epoch_keys(root)[1:])]
        everything, *found = await self._read(lambda lane: self.backend.get_many(wanted, lane), _WRITE_SECONDS, 0)
        return [
            TenantEpochs(everything, tenant, chunks) for tenant, chunks in zip(found[::2], found[1::2], strict=True)
        ]

    async def read_global_epoch(self) -> bytes | None:
        """The mark of everything under the prefix. Raises RemoteFailed."""
        return (
            await self._read(
                lambda lane: self.backend.get_many([self.key_schema.global_epoch_key], lane), _WRITE_SECONDS, 0
            )
        )[0]

    async def read_deletions_epoch(self) -> bytes | None:
        """A value that is another one after each deletion of anything. Raises RemoteFailed."""
        names = [self.key_schema.deletions_epoch_key]
        return (await self._read(lambda lane: self.backend.get_many(names, lane), _WRITE_SECONDS, 0))[0]

    def _decode(self, root: bytes, key: bytes, record: bytes | None, mark: bytes | None) -> RemoteRecord | None:
        if record is None or mark is None:
            return None
        try:
            entry = decode_record(self.cipher, self.key_schema.record_key(root, key), record)
            if entry.header.root != root or entry.header.prefix_hash != key:
                raise InvalidRecord("it is another tenant's, or another chunk")
        except InvalidRecord as error:
            self.reject(root, key, error)
            return None
        over = entry.expires_at and entry.expires_at <= self._clock()
        return None if over or entry.epoch != mark else entry

    async def read_payloads(self, entries: Sequence[RemoteRecord], seconds: float) -> list[list[bytes] | None]:
        """The parts of some entries' payloads, of a few megabytes together; None for one of which a part is missing, as
        when the engine has pushed it out. Raises RemoteFailed."""
        names = [self._payload_keys(entry) for entry in entries]
        flat = [name for of_one in names for name in of_one]
        size = sum(entry.stored_length for entry in entries)
        tried_until = time.monotonic() + seconds
        # Of a look-up that has begun nothing is left out: it waits for the calls that try the engine.
        while self.reads.trials_full and time.monotonic() < tried_until:  # noqa: ASYNC110
            await asyncio.sleep(_TRIAL_SECONDS)
        found = await self._read(lambda lane: self.backend.get_many(flat, lane), seconds, size)
        values = iter(found)
        out: list[list[bytes] | None] = []
        for entry, of_one in zip(entries, names, strict=True):
            parts = [value for _, value in zip(of_one, values, strict=False) if value is not None]
            out.append(parts if len(parts) == entry.num_parts else None)
        self.counters.read_bytes += size
        return out

    def group_by_call(self, entries: Sequence[RemoteRecord]) -> list[list[RemoteRecord]]:
        """Entries in order, as many together as one call may bring: records may claim many parts of few bytes."""
        out: list[list[RemoteRecord]] = []
        size = parts = 0
        for entry in entries:
            if not out or size + entry.stored_length > _CALL_BYTES or parts + entry.num_parts > MAX_PARTS:
                out.append([])
                size = parts = 0
            out[-1].append(entry)
            size, parts = size + entry.stored_length, parts + entry.num_parts
        return out

    def _payload_keys(self, entry: RemoteRecord) -> list[str]:
        header = entry.header
        return self.key_schema.payload_keys(header.root, header.prefix_hash, entry.stored_checksum, entry.num_parts)

    def seconds_left(self, entry: RemoteRecord) -> float:
        """Seconds that an entry has left; infinite without an end."""
        return entry.expires_at - self._clock() if entry.expires_at else inf

    def outlives_half_ttl(self, entry: RemoteRecord, ttl_seconds: int | None) -> bool:
        """Whether an entry has at least half of the time left that it would be given now."""
        left = self.seconds_left(entry)
        return left == inf or (ttl_seconds is not None and left > ttl_seconds / 2 - 1)

    def reject(self, root: bytes, key: bytes, error: InvalidRecord) -> None:
        """Counts a value that is not what it should be. What is worth nothing to anybody is to be removed, or every
        look-up would come across it."""
        self.counters.rejected += 1
        if self.counters.rejected == 1:
            log.warning("a value of the remote tier is not what it should be; it is not used", why=str(error))
        if error.corrupt:
            self.queue_removal(root, key)

    def queue_removal(self, root: bytes, key: bytes) -> None:
        """Notes a record that is to be removed."""
        if len(self.corrupt_records) < _MAX_CORRUPT_RECORDS:
            self.corrupt_records[root, key] = None

    async def list_prefix_hashes(self, root: bytes) -> list[bytes]:
        """The prefix hashes of a tenant's records, sound or not, in no order. Raises RemoteFailed."""
        found: dict[bytes, None] = {}
        async for page in self.scan(self.key_schema.tenant_prefix(root)):
            hashes = (self.key_schema.hash_of_record_key(root, name) for name in page)
            found |= dict.fromkeys(key for key in hashes if key is not None)
        return list(found)

    # ---- writing --------------------------------------------------------------------------------------------

    async def store(self, batch: Sequence[EncodedChunk]) -> None:
        """Writes chunks, all payloads before any record. Raises RemoteFailed, after which some may be there."""
        parts: dict[int | None, list[Item]] = {}
        records: dict[int | None, list[Item]] = {}
        for out in batch:
            root, key, size = out.header.root, out.header.prefix_hash, self.backend.part_bytes
            cut = [out.stored[at : at + size] for at in range(0, len(out.stored), size)]
            names = self.key_schema.payload_keys(root, key, out.checksum, len(cut))
            parts.setdefault(out.ttl_seconds, []).extend(zip(names, cut, strict=True))
            ends = 0 if out.ttl_seconds is None else int(self._clock()) + out.ttl_seconds
            entry = RemoteRecord(out.header, out.codec, len(cut), len(out.stored), out.checksum, ends, out.epoch)
            name = self.key_schema.record_key(root, key)
            records.setdefault(out.ttl_seconds, []).append((name, encode_record(self.cipher, name, entry)))
        for items_by_ttl in (parts, records):
            for ttl, items in items_by_ttl.items():
                for group in _batches(items):
                    await self.write(group, ttl)
        self.counters.written_chunks += len(batch)
        self.counters.written_bytes += sum(len(out.stored) for out in batch)

    async def create_tenant_epoch(self, root: bytes) -> None:
        """Gives a tenant a mark if it has none; of several nodes one wins. Raises RemoteFailed."""
        async with self._guarded(self.writes, _WRITE_SECONDS):
            await self.backend.put_if_absent(self.key_schema.tenant_epoch_key(root), new_epoch(deletion=False))

    async def write(self, items: Sequence[Item], ttl_seconds: int | None) -> None:
        """Writes values of a few megabytes. Raises RemoteFailed."""
        size = sum(len(value) for _, value in items)
        async with self._guarded(self.writes, _WRITE_SECONDS + size / _WRITE_BYTES_PER_SECOND):
            await self.backend.put_many(items, ttl_seconds)

    # ---- deleting -------------------------------------------------------------------------------------------

    async def contains(self, root: bytes, key: bytes) -> bool:
        """Whether a chunk is there, in one round trip. Raises RemoteFailed."""
        return (await self.find(root, [key], _WRITE_SECONDS)).records[0] is not None

    async def remove_corrupt(self) -> None:
        """Removes records that were rejected; their parts are found by nobody then. Raises RemoteFailed."""
        while self.corrupt_records:
            some = list(self.corrupt_records)[:_PAGE]
            await self.remove([self.key_schema.record_key(root, key) for root, key in some])
            for gone in some:
                self.corrupt_records.pop(gone, None)

    async def scan(self, prefix: str) -> AsyncIterator[list[str]]:
        """All names with a prefix, as the engine tells them. Raises RemoteFailed."""
        pages = aiter(self.backend.scan(prefix))
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
                await self.backend.delete_many(names[at : at + _PAGE])

    # ---- calls ----------------------------------------------------------------------------------------------

    async def _read(self, work: Callable[[int], Awaitable[T]], seconds: float, size: int) -> T:
        late = _MIN_HEDGE_SECONDS + _HEDGE_FACTOR * self.latency.estimate_seconds(size)
        async with self._guarded(self.reads, seconds):
            return await self.hedged_reads.first_result(work, late)

    @asynccontextmanager
    async def _guarded(self, breaker: CircuitBreaker, seconds: float) -> AsyncIterator[None]:
        """A call behind a circuit, with a deadline. Raises RemoteFailed."""
        call, turn = breaker.begin_call(), breaker.num_opened
        if call is None:
            self.demand.set()
            raise RemoteBusy("it is being tried") if breaker.trials_full else RemoteFailed(breaker.reason)
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            if seconds >= _MIN_MEANINGFUL_SECONDS:
                self._record_failure(breaker, turn, "it does not answer in time")
            raise RemoteFailed("it did not answer in time") from error
        except RemoteFailed as error:
            self._record_failure(breaker, turn, str(error))
            raise
        finally:
            breaker.end_call(call)
        if breaker.num_opened == turn:
            breaker.record_success()

    def _record_failure(self, breaker: CircuitBreaker, turn: int, why: str) -> None:
        """A call that began before the circuit last opened says nothing about the engine that has come back since."""
        self.counters.failures += 1
        if breaker.num_opened == turn and breaker.record_failure(why):
            self.demand.set()

    # ---- watching -------------------------------------------------------------------------------------------

    async def probe_read(self, seconds: float) -> None:
        """Asks the engine something small, past the circuit, and notes what it took. Raises RemoteFailed."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(seconds):
                await self.backend.get_many([self.key_schema.global_epoch_key])
        except TimeoutError as error:
            raise RemoteFailed("it does not answer in time") from error
        self.latency.record_round_trip(time.perf_counter() - began)

    async def probe_write(self, seconds: float) -> None:
        """Writes something small, past the circuit. Raises RemoteFailed."""
        try:
            async with asyncio.timeout(seconds):
                await self.backend.put_many([(f"{self.key_schema.root_prefix}probe", b"probe")], 60)
        except TimeoutError as error:
            raise RemoteFailed("it does not answer in time") from error


def _batches(items: list[Item]) -> list[list[Item]]:
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
