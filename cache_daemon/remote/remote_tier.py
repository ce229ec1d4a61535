"""The remote tier over a backend: finds, reads, writes, deletes and verifies chunk records.

It raises only RemoteFailed and InvalidRecord. No call exceeds its timeout, and while the circuit is open calls fail at
once. Runs on one event loop; callers do heavy work on threads.
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
from cache_daemon.remote.hedged_reads import HedgedReads
from cache_daemon.remote.key_schema import KeySchema
from cache_daemon.remote.latency_model import LatencyModel
from cache_daemon.remote.remote_record import (
    MAX_PARTS,
    MAX_RECORD_BYTES,
    InvalidRecord,
    RemoteRecord,
    TenantEpochs,
    decode_record,
    encode_record,
    new_epoch,
)

# A call that fails after a shorter timeout says nothing about the backend.
_MIN_MEANINGFUL_SECONDS = 0.1
# A read is hedged after the first value times its estimated time, but not before the second value in seconds.
_HEDGE_FACTOR, _MIN_HEDGE_SECONDS = 3.0, 0.02
# Maximal bytes of one call, so that no answer blocks the event loop for long.
_CALL_BYTES = 4 << 20
# Timeout of a write and of the lookup before it: a constant, plus the time for the bytes at this speed.
_WRITE_SECONDS, _WRITE_BYTES_PER_SECOND = 2.0, 4e6
_PAGE, _MAX_CORRUPT_RECORDS = 256, 1024
_MAX_EPOCH_BYTES = 256
_TRIAL_SECONDS = 0.002
# Number of records that are verified before other work runs on the event loop.
_RECORDS_PER_SLICE = 32

T = TypeVar("T")
log = structlog.get_logger("cache_daemon")


@dataclass
class RemoteCounters:
    """Totals since the start."""

    failures: int = 0  # calls that failed or timed out
    rejected: int = 0  # values that failed verification
    read_bytes: int = 0
    written_bytes: int = 0
    written_chunks: int = 0


@dataclass(frozen=True)
class RecordLookup:
    """Valid records of a tenant, and its epochs.

    ``records`` are in the requested order, with None for missing records.
    """

    records: list[RemoteRecord | None]
    epochs: TenantEpochs

    @property
    def record_epoch(self) -> bytes | None:
        """Epoch of the tenant's valid records; None if no record can be valid."""
        return self.epochs.record_epoch

    @property
    def leading(self) -> list[RemoteRecord]:
        """Records before the first missing one."""
        out: list[RemoteRecord] = []
        for entry in self.records:
            if entry is None:
                break
            out.append(entry)
        return out


@dataclass(frozen=True)
class EncodedChunk:
    """A chunk to write: its complete header, and its payload in stored form."""

    header: ChunkHeader
    codec: int
    stored: memoryview
    checksum: int
    ttl_seconds: int | None
    epoch: bytes


class RemoteTier:
    """Reads and writes of one backend.

    ``cipher`` encrypts values; the backend sees only names, sizes and times.
    """

    def __init__(
        self, backend: RemoteBackend, key_schema: KeySchema, cipher: Cipher, clock: Callable[[], float] = time.time
    ) -> None:
        self.backend, self.key_schema, self.cipher, self._clock = backend, key_schema, cipher, clock
        self.reads, self.writes = CircuitBreaker(), CircuitBreaker()
        self.latency, self.counters, self.hedged_reads = LatencyModel(), RemoteCounters(), HedgedReads(backend.lanes)
        self.demand = asyncio.Event()  # the circuit or the cost model has refused a caller
        self.corrupt_records: dict[tuple[bytes, bytes], None] = {}  # (root, prefix hash) of records to remove
        self.backend_generation = 0  # number of reconnects; before each, the backend may have lost its data

    # ---- reading --------------------------------------------------------------------------------------------

    async def find(self, root: bytes, hashes: Sequence[bytes], seconds: float) -> RecordLookup:
        """Find a tenant's records, in one round trip. Raises RemoteFailed.

        Invalid records are counted and treated as missing.
        """
        names = self.key_schema
        wanted = [*self._epoch_keys(root), *(names.record_key(root, key) for key in hashes)]
        began = time.perf_counter()
        try:
            everything, tenant, chunks, *records = await self._read(
                lambda lane: self.backend.get_many(wanted, lane, [MAX_RECORD_BYTES] * len(wanted)), seconds, 0
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
        """Read the epochs of some tenants, in one round trip. Raises RemoteFailed."""
        wanted = [self.key_schema.global_epoch_key, *(name for root in roots for name in self._epoch_keys(root)[1:])]
        everything, *found = await self._read_small(wanted)
        return [
            TenantEpochs(everything, tenant, chunks) for tenant, chunks in zip(found[::2], found[1::2], strict=True)
        ]

    async def read_global_epoch(self) -> bytes | None:
        """Read the global epoch. Raises RemoteFailed."""
        return (await self._read_small([self.key_schema.global_epoch_key]))[0]

    async def read_deletions_epoch(self) -> bytes | None:
        """Read the deletions epoch, which every deletion replaces. Raises RemoteFailed."""
        return (await self._read_small([self.key_schema.deletions_epoch_key]))[0]

    async def _read_small(self, names: Sequence[str]) -> list[bytes | None]:
        limits = [_MAX_EPOCH_BYTES] * len(names)
        return await self._read(lambda lane: self.backend.get_many(names, lane, limits), _WRITE_SECONDS, 0)

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
        """Read the payload parts of some records, a few megabytes in all.

        The result is None for a record with a missing part, which the backend may have evicted. Raises RemoteFailed.
        """
        names = [self._payload_keys(entry) for entry in entries]
        flat = [name for of_one in names for name in of_one]
        limits = [entry.max_part_bytes for entry in entries for _ in range(entry.num_parts)]
        size = sum(entry.stored_length for entry in entries)
        tried_until = time.monotonic() + seconds
        # The records were looked up already, so this read waits until the circuit admits another trial call.
        while self.reads.trials_full and time.monotonic() < tried_until:  # noqa: ASYNC110
            await asyncio.sleep(_TRIAL_SECONDS)
        found = await self._read(lambda lane: self.backend.get_many(flat, lane, limits), seconds, size)
        values = iter(found)
        out: list[list[bytes] | None] = []
        for entry, of_one in zip(entries, names, strict=True):
            parts = [value for _, value in zip(of_one, values, strict=False) if value is not None]
            out.append(parts if len(parts) == entry.num_parts else None)
        self.counters.read_bytes += size
        return out

    def group_by_call(self, entries: Sequence[RemoteRecord]) -> list[list[RemoteRecord]]:
        """Group records, in order, by the limits of one call. A record may have many small parts."""
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
        """Return the seconds until a record expires; infinite without an expiry."""
        return entry.expires_at - self._clock() if entry.expires_at else inf

    def outlives_half_ttl(self, entry: RemoteRecord, ttl_seconds: int | None) -> bool:
        """Return True if a record has at least half of ``ttl_seconds`` left."""
        left = self.seconds_left(entry)
        return left == inf or (ttl_seconds is not None and left > ttl_seconds / 2 - 1)

    def reject(self, root: bytes, key: bytes, error: InvalidRecord) -> None:
        """Count an invalid record.

        A corrupt record is removed later; otherwise every lookup would read it again.
        """
        self.counters.rejected += 1
        if self.counters.rejected == 1:
            log.warning("a value of the remote tier failed verification; it is not used", why=str(error))
        if error.corrupt:
            self.queue_removal(root, key)

    def queue_removal(self, root: bytes, key: bytes) -> None:
        """Queue a record for ``remove_corrupt``."""
        if len(self.corrupt_records) < _MAX_CORRUPT_RECORDS:
            self.corrupt_records[root, key] = None

    async def list_prefix_hashes(self, root: bytes) -> list[bytes]:
        """List the prefix hashes of a tenant's records, valid or not, unordered. Raises RemoteFailed."""
        found: dict[bytes, None] = {}
        async for page in self.scan(self.key_schema.tenant_prefix(root)):
            hashes = (self.key_schema.hash_of_record_key(root, name) for name in page)
            found |= dict.fromkeys(key for key in hashes if key is not None)
        return list(found)

    async def scan(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yield pages of all names with a prefix. Raises RemoteFailed."""
        pages = aiter(self.backend.scan(prefix))
        while True:
            async with self._guarded(self.reads, _WRITE_SECONDS * 2):
                try:
                    page = await anext(pages)
                except StopAsyncIteration:
                    return
            yield page

    # ---- writing --------------------------------------------------------------------------------------------

    async def store(self, batch: Sequence[EncodedChunk]) -> None:
        """Write chunks, all payloads before any record. Raises RemoteFailed; some chunks may then be stored."""
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
        """Create a tenant's epoch if it has none; if several nodes do so, one epoch stays. Raises RemoteFailed."""
        async with self._guarded(self.writes, _WRITE_SECONDS):
            await self.backend.put_if_absent(self.key_schema.tenant_epoch_key(root), new_epoch(deletion=False))

    async def create_deletions_epoch(self) -> None:
        """Create the deletions epoch, a random value, if the backend has none.

        So nodes see another value after the backend has lost its data. Raises RemoteFailed."""
        async with self._guarded(self.writes, _WRITE_SECONDS):
            await self.backend.put_if_absent(self.key_schema.deletions_epoch_key, new_epoch(deletion=False))

    async def write(self, items: Sequence[Item], ttl_seconds: int | None) -> None:
        """Write values, a few megabytes in all. Raises RemoteFailed."""
        size = sum(len(value) for _, value in items)
        async with self._guarded(self.writes, _WRITE_SECONDS + size / _WRITE_BYTES_PER_SECOND):
            await self.backend.put_many(items, ttl_seconds)

    # ---- deleting -------------------------------------------------------------------------------------------

    async def contains(self, root: bytes, key: bytes) -> bool:
        """Return True if the backend has a chunk, after one round trip. Raises RemoteFailed."""
        return (await self.find(root, [key], _WRITE_SECONDS)).records[0] is not None

    async def remove_corrupt(self) -> None:
        """Remove queued records; no reader finds their parts then. Raises RemoteFailed."""
        while self.corrupt_records:
            some = list(self.corrupt_records)[:_PAGE]
            await self.remove([self.key_schema.record_key(root, key) for root, key in some])
            for gone in some:
                self.corrupt_records.pop(gone, None)

    async def remove(self, names: Sequence[str]) -> None:
        """Remove values. Raises RemoteFailed."""
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
        """Run a call through a circuit breaker, with a timeout. Raises RemoteFailed."""
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
        """Record a failed call, unless it began before the circuit last opened."""
        self.counters.failures += 1
        if breaker.num_opened == turn and breaker.record_failure(why):
            self.demand.set()

    # ---- probes ---------------------------------------------------------------------------------------------

    async def probe_read(self, seconds: float) -> None:
        """Read a small value without the circuit breaker, and record its latency. Raises RemoteFailed."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(seconds):
                await self.backend.get_many([self.key_schema.global_epoch_key], 0, [_MAX_EPOCH_BYTES])
        except TimeoutError as error:
            raise RemoteFailed("it does not answer in time") from error
        self.latency.record_round_trip(time.perf_counter() - began)

    async def probe_write(self, seconds: float) -> None:
        """Write a small value without the circuit breaker. Raises RemoteFailed."""
        try:
            async with asyncio.timeout(seconds):
                await self.backend.put_many([(f"{self.key_schema.root_prefix}probe", b"probe")], 60)
        except TimeoutError as error:
            raise RemoteFailed("it does not answer in time") from error


def _batches(items: list[Item]) -> list[list[Item]]:
    """Split values into batches of some megabytes."""
    out: list[list[Item]] = []
    size = 0
    for item in items:
        if not out or size + len(item[1]) > _CALL_BYTES:
            out.append([])
            size = 0
        out[-1].append(item)
        size += len(item[1])
    return out
