"""Prefetch from the remote tier, before a prompt is matched.

The caller sends the ends of the prompt's chunks, so the prefetcher knows their names and finds them in one round trip.
It then decides whether loading them is faster than computing them. If so, it loads them in order, until all are loaded
or the caller would compute the remaining chunks faster. A fetched chunk becomes visible as a committed chunk does: only
after its payload is verified and its parent is visible, and never in part.

A slot is allocated only when its payload has arrived, so a cancelled or late caller leaves no slots behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvsidecar import keys

from cache_daemon.remote.backend import RemoteFailed
from cache_daemon.remote.deletion_epochs import DeletionEpochs, EpochChange
from cache_daemon.remote.fetch_or_compute import FetchOrCompute
from cache_daemon.remote.fetch_request import FetchRequest, FetchResult, InflightLookup, InflightLookups
from cache_daemon.remote.remote_chunk_inserter import RemoteChunkInserter, consume_exception
from cache_daemon.remote.remote_record import RemoteRecord
from cache_daemon.remote.remote_tier import RemoteTier
from cache_daemon.store.leases import LeaseGuard
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.yield_timer import YieldTimer

# Fewer missing tokens than the first number are not worth a lookup. A lookup has at most the second number of chunks.
_MIN_TOKENS, _MAX_CHUNKS = 16, 1024
# Maximal number of groups whose payloads are being downloaded, or are downloaded but not inserted. And the time without
# an answer after which a download counts as failed.
_MAX_DOWNLOADS, _STALLED_SECONDS = 8, 5.0
_MEASURE_SECONDS = 5.0


@dataclass
class FetchCounters:
    """Totals since the start."""

    lookups: int = 0  # lookups sent to the backend
    hits: int = 0  # fetches that added tokens
    tokens: int = 0
    bypassed: int = 0  # fetches not tried, since computing is faster
    late: int = 0  # fetches stopped, since computing became faster


@dataclass(frozen=True)
class _ChunkSpan:
    """A chunk of the caller's prompt."""

    key: bytes
    start: int
    end: int


class RemotePrefetcher:
    """Fetches chunks of a prompt from the remote tier before it is matched.

    Runs on the event loop.
    """

    def __init__(
        self,
        tiers: TierManager,
        inserter: RemoteChunkInserter,
        tier: RemoteTier,
        epochs: DeletionEpochs,
        lookups: InflightLookups,
    ) -> None:
        self._tiers, self._inserter, self._tier = tiers, inserter, tier
        self._epochs, self._lookups, self._decision = epochs, lookups, FetchOrCompute(tier.latency)
        self._inflight_by_key: dict[bytes, asyncio.Future[bool]] = {}  # a result of False: the fetch was cancelled
        self._downloads = _Downloads(tier)
        self._measurement: asyncio.Task[None] | None = None
        self.counters = FetchCounters()

    async def fetch(self, request: FetchRequest) -> FetchResult:
        """Extend the stored prefix of a prompt with chunks of the remote tier.

        Raises nothing. Cancelling the caller leaves no slots or leases behind.
        """
        began = time.perf_counter()
        tokens, load_slower = 0, False
        if self._tier.reads.allows_calls and not self._lookups.is_deleting(request.root):
            try:
                tokens, load_slower = await self._fetch_missing(request, began)
            except (RemoteFailed, TimeoutError):
                tokens = 0
        elif request.hints.chunk_ends:
            self._tier.demand.set()
        return FetchResult(tokens, time.perf_counter() - began, load_slower)

    async def _fetch_missing(self, request: FetchRequest, began: float) -> tuple[int, bool]:
        """Return the number of added tokens, and whether it skipped stored tokens because computing them is faster."""
        spans, ahead = await self._missing_chunks(request)
        if not spans:
            return 0, False
        prefill_seconds = request.hints.seconds_per_token * ahead
        if self._decision.computing_is_faster(prefill_seconds):
            self._record_bypass()
            return 0, False  # the contents of the tier are unknown
        while (running := self._inflight_by_key.get(spans[0].key)) is not None:
            # Another request fetches the same chunks. The match will find them, unless that request was cancelled.
            limit = self._decision.wait_timeout(request.hints, prefill_seconds)
            await asyncio.wait({running}, timeout=max(0.0, began + limit - time.perf_counter()))
            if not running.done() or running.result():
                return 0, False
        future, done = asyncio.get_running_loop().create_future(), True
        self._inflight_by_key[spans[0].key] = future
        try:
            with self._lookups.track(request.root) as lookup:
                return await self._look_up(request, lookup, spans, prefill_seconds, began)
        except asyncio.CancelledError:
            done = False
            raise
        finally:
            del self._inflight_by_key[spans[0].key]
            future.set_result(done)

    # ---- missing chunks -------------------------------------------------------------------------------------

    async def _missing_chunks(self, request: FetchRequest) -> tuple[list[_ChunkSpan], int]:
        """Return the prompt's chunks that are not stored.

        Also returns the number of tokens in these chunks. Returns no chunks if the tokens are too few for a lookup.
        """
        out: list[_ChunkSpan] = []
        parent, start, yield_timer = request.root, 0, YieldTimer()
        for end in request.hints.chunk_ends:
            ids = request.ids[start * keys.TOKEN_BYTES : end * keys.TOKEN_BYTES]
            parent = keys.prefix_hash(parent, ids)
            if out or self._tiers.index.get(parent) is None:
                out.append(_ChunkSpan(parent, start, end))
                if len(out) == _MAX_CHUNKS:
                    break
            start = end
            await yield_timer.maybe_yield()
        ahead = out[-1].end - self._num_cached_tokens(request) if out else 0
        return (out, ahead) if ahead >= _MIN_TOKENS else ([], 0)

    def _num_cached_tokens(self, request: FetchRequest) -> int:
        return sum(n for _, n in self._tiers.index.match(request.root, request.ids))

    async def _look_up(
        self,
        request: FetchRequest,
        lookup: InflightLookup,
        spans: list[_ChunkSpan],
        prefill_seconds: float,
        began: float,
    ) -> tuple[int, bool]:
        self.counters.lookups += 1
        timeout = self._decision.lookup_timeout(request.hints, prefill_seconds)
        found = await self._tier.find(request.root, [span.key for span in spans], timeout)
        was_invalidated = lookup.invalidated
        if self._epochs.observe(request.root, found.epochs) is EpochChange.DELETION_LOST:
            return 0, False
        # This lookup already read the epoch that the deletion set, so the deletion just observed must not invalidate
        # it.
        lookup.invalidated = was_invalidated
        lookup.keys = frozenset(record.header.prefix_hash for record in found.leading)
        records = await self._verify_chain(request, spans, found.leading)
        before = self._num_cached_tokens(request)
        while records and spans[len(records) - 1].end - before < _MIN_TOKENS:
            records.pop()
        if not records or lookup.invalidated:
            return 0, False
        ends = [span.end - before for span in spans]
        chosen, limit = self._decision.choose(request.hints, records, ends, time.perf_counter() - began)
        if not chosen:
            self._record_bypass(records)
            return 0, True
        late = await self._download(request, lookup, records[:chosen], limit)
        tokens = max(0, self._num_cached_tokens(request) - before)
        self.counters.tokens += tokens
        self.counters.hits += tokens > 0
        return tokens, late or chosen < len(records)

    @staticmethod
    async def _verify_chain(
        request: FetchRequest, spans: Sequence[_ChunkSpan], records: Sequence[RemoteRecord]
    ) -> list[RemoteRecord]:
        """Return the leading records that match the prompt's chunks, tokens included."""
        out: list[RemoteRecord] = []
        yield_timer = YieldTimer()
        for span, record in zip(spans, records, strict=False):
            await yield_timer.maybe_yield()
            header = record.header
            ids = request.ids[span.start * keys.TOKEN_BYTES : span.end * keys.TOKEN_BYTES]
            if (
                header.start_position != span.start
                or not request.accepts(header)
                or keys.token_bytes(header.token_ids[:]) != ids
            ):
                break
            out.append(record)
        return out

    # ---- download -------------------------------------------------------------------------------------------

    async def _download(
        self, request: FetchRequest, lookup: InflightLookup, records: Sequence[RemoteRecord], limit: float
    ) -> bool:
        """Download groups concurrently, and insert their chunks in order. Returns whether a group came too late."""
        began, size = time.perf_counter(), 0
        deadline, groups = began + limit, self._tier.group_by_call(records)
        lease = LeaseGuard([], self._tiers.on_released, request.usage)
        try:
            with self._downloads.start(groups) as downloads:
                for download in downloads:
                    if not await self._insert(request, lookup, download, deadline, lease):
                        return time.perf_counter() >= deadline
                    size += sum(record.stored_length for record in download.group)
        finally:
            if time.perf_counter() >= deadline:  # if no payload arrived, the first group was too large
                size = size or sum(record.stored_length for record in groups[0])
            self._tier.latency.record_transfer(size, time.perf_counter() - began)
            lease.release()
        return False

    async def _insert(
        self, request: FetchRequest, lookup: InflightLookup, download: _Download, deadline: float, lease: LeaseGuard
    ) -> bool:
        """Wait for a group and insert it. Returns True if all its chunks are in the arena."""
        payloads = await download.wait_payloads(max(0.0, deadline - time.perf_counter()))
        if payloads is None:
            self.counters.late += time.perf_counter() >= deadline
            return False
        placed = await self._inserter.insert(
            request, download.group, payloads, lease, lambda: lookup.invalidated, delay_persist=True
        )
        download.inserted.set()
        return placed

    # ---- bypass ---------------------------------------------------------------------------------------------

    def _record_bypass(self, records: Sequence[RemoteRecord] = ()) -> None:
        """Count a prompt that is faster to compute.

        From time to time it starts a measurement of the backend, in the background.
        """
        self.counters.bypassed += 1
        self._tier.demand.set()
        idle = self._measurement is None or self._measurement.done()
        if records and idle and time.monotonic() - self._tier.latency.bandwidth_measured_at > _MEASURE_SECONDS:
            self._measurement = asyncio.create_task(self._measure(self._tier.group_by_call(records)[0]))

    async def _measure(self, group: list[RemoteRecord]) -> None:
        began = time.perf_counter()
        try:
            await self._tier.read_payloads(group, _MEASURE_SECONDS)
        except RemoteFailed:
            return
        self._tier.latency.record_transfer(sum(e.stored_length for e in group), time.perf_counter() - began)

    async def close(self) -> None:
        """Cancel the measurement."""
        if self._measurement is not None:
            self._measurement.cancel()
            await asyncio.wait({self._measurement})


@dataclass(eq=False)
class _Download:
    """A group of records whose payloads are downloaded."""

    group: list[RemoteRecord]
    inserted: asyncio.Event = field(default_factory=asyncio.Event)  # set once the payloads are inserted
    _payloads: list[list[bytes] | None] | None = None
    _done: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, tier: RemoteTier, room: asyncio.Semaphore) -> None:
        """Download the payloads, and keep a download slot until they are inserted. Raises RemoteFailed."""
        async with room:
            try:
                self._payloads = await tier.read_payloads(self.group, _STALLED_SECONDS)
            finally:
                self._done.set()
            await self.inserted.wait()

    async def wait_payloads(self, seconds: float) -> list[list[bytes] | None] | None:
        """Return the payloads, which the caller then owns; None if the download failed or is late."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._done.wait()
        payloads, self._payloads = self._payloads, None
        return payloads


class _Downloads:
    """Downloads of one tier, with one limit for all prompts."""

    def __init__(self, tier: RemoteTier) -> None:
        self._tier, self._slots = tier, asyncio.Semaphore(_MAX_DOWNLOADS)

    @contextlib.contextmanager
    def start(self, groups: Sequence[list[RemoteRecord]]) -> Iterator[list[_Download]]:
        """Download groups in order; the end of the ``with`` block cancels unfinished downloads.

        Download slots are granted in the order of requests. So the group that is inserted next always gets a slot
        before later groups, and prompts do not deadlock.
        """
        downloads = [_Download(group) for group in groups]
        tasks = [asyncio.create_task(download.run(self._tier, self._slots)) for download in downloads]
        try:
            yield downloads
        finally:
            for task in tasks:
                task.cancel()
                task.add_done_callback(consume_exception)
