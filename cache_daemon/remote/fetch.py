"""Bringing in what a remote tier has of a prompt, before the prompt is looked up here.

One round trip finds the chunks: the asker says where it would cut the prompt, so that their names are known. Then it is
decided whether bringing them is quicker than computing them, and if so they come, in order, until they are here or
computing would have been quicker. A chunk becomes visible as by a commit: verified, behind its parent, all at once.

No slot is taken before its payload has arrived; so whoever goes away, or has no time left, leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import Geometry

from cache_daemon.remote.backend import RemoteFailed
from cache_daemon.remote.deletion_epochs import EpochChange
from cache_daemon.remote.downloads import Download, Downloads
from cache_daemon.remote.epoch_format import TenantEpochs
from cache_daemon.remote.fetch_insert import RemoteChunkInserter
from cache_daemon.remote.remote_record import RemoteRecord
from cache_daemon.remote.remote_tier import RemoteTier
from cache_daemon.store.sessions import LeaseGuard
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.yield_timer import YieldTimer

# A look-up that is not answered by then, or by some times what it usually takes, is given up; of what computing costs
# it may take a part.
_LOOKUP_SECONDS, _LOOKUP_LATENCY_FACTOR, _LOOKUP_MAX_SECONDS, _LOOKUP_SHARE = 0.25, 8.0, 1.0, 0.5
# Nobody waits longer, even where nobody knows what computing costs.
_MAX_FETCH_SECONDS = 10.0
# Fewer tokens are not worth asking for; more chunks than these are not asked for at once.
_MIN_TOKENS, _MAX_CHUNKS = 16, 1024
_MEASURE_SECONDS = 5.0


@dataclass(frozen=True)
class FetchRequest:
    """A prompt that is looked up: ``ids`` are uint32 little-endian, ``cuts`` the rising ends of its chunks, ``price``
    what the asker computes a token in (seconds; 0: unknown), ``patience`` how long it will wait at most, ``until`` how
    long what comes is kept, on the store's clock."""

    root: bytes
    tenant: bytes
    geometry: Geometry
    ids: bytes
    chunk_ends: Sequence[int]
    seconds_per_token: float
    timeout_seconds: float
    expires_at: float = inf

    def accepts(self, header: ChunkHeader) -> bool:
        """Whether a chunk is the tenant's, and has the model's geometry."""
        return header.tenant == self.tenant and Geometry.of(header) == self.geometry


@dataclass(frozen=True)
class FetchResult:
    """Tokens that the remote tier added to the prefix, and the seconds that it took, in vain or not."""

    tokens: int = 0
    seconds: float = 0.0


@dataclass
class FetchCounters:
    """Since the start."""

    lookups: int = 0  # that asked the engine
    hits: int = 0  # that brought something
    tokens: int = 0
    bypassed: int = 0  # that were, or would have been, slower than computing
    late: int = 0  # that were cut off, since computing would have been quicker


@dataclass(eq=False)
class InflightLookup:
    """A look-up of a tenant's chunks; ``void`` as soon as some of them are deleted. ``keys`` are those that were found,
    None while that is not known."""

    root: bytes
    invalidated: bool = False
    keys: frozenset[bytes] | None = None


@dataclass(frozen=True)
class _ChunkSpan:
    """A chunk of the asker's chain."""

    key: bytes
    start: int
    end: int


class RemotePrefetcher:
    """``seen`` hears the marks that a tenant has in the engine; ``closed`` says whether a tenant's chunks must not be
    asked for."""

    def __init__(
        self,
        tiers: TierManager,
        placing: RemoteChunkInserter,
        tier: RemoteTier,
        seen: Callable[[bytes, TenantEpochs], EpochChange],
        closed: Callable[[bytes], bool],
    ) -> None:
        self._tiers, self._inserter, self._tier = tiers, placing, tier
        self._observe_epochs, self._is_deleting = seen, closed
        self._inflight_by_key: dict[bytes, asyncio.Future[bool]] = {}  # the result is whether it came to its end
        self._inflight: set[InflightLookup] = set()
        self._downloads = Downloads(tier)
        self._measurement: asyncio.Task[None] | None = None
        self.counters = FetchCounters()

    async def fetch(self, wanted: FetchRequest) -> FetchResult:
        """Adds to the local prefix of a prompt what the remote tier has of it. Raises nothing; whoever is cancelled
        leaves nothing behind."""
        began = time.perf_counter()
        tokens = 0
        if self._tier.reads.allows_calls and not self._is_deleting(wanted.root):
            try:
                tokens = await self._fetch_missing(wanted, began)
            except (RemoteFailed, TimeoutError):
                tokens = 0
        elif wanted.chunk_ends:
            self._tier.demand.set()
        return FetchResult(tokens, time.perf_counter() - began)

    def invalidate(self, root: bytes, keys: frozenset[bytes] | None = None) -> None:
        """A tenant, or without a root everybody, has deleted something: what was found before is not brought. With
        ``keys`` it was these chunks."""
        for asking in self._inflight:
            if root in (b"", asking.root) and (keys is None or asking.keys is None or keys & asking.keys):
                asking.invalidated = True

    @contextmanager
    def track_lookup(self, root: bytes) -> Iterator[InflightLookup]:
        """A look-up while it lasts, which hears of deletions."""
        asking = InflightLookup(root, self._is_deleting(root))
        self._inflight.add(asking)
        try:
            yield asking
        finally:
            self._inflight.remove(asking)

    async def _fetch_missing(self, wanted: FetchRequest, began: float) -> int:
        links, ahead = await self._missing_chunks(wanted)
        if not links:
            return 0
        worth = wanted.seconds_per_token * ahead
        if worth and self._tier.latency.estimate_seconds(0, 2) > worth:
            self._record_bypass()
            return 0
        while (other := self._inflight_by_key.get(links[0].key)) is not None:
            # Somebody brings the same; what comes of it is found below, unless whoever asked for it went away.
            limit = min(wanted.timeout_seconds, worth or _LOOKUP_SECONDS)
            await asyncio.wait({other}, timeout=max(0.0, began + limit - time.perf_counter()))
            if not other.done() or other.result():
                return 0
        mine, done = asyncio.get_running_loop().create_future(), True
        self._inflight_by_key[links[0].key] = mine
        try:
            with self.track_lookup(wanted.root) as asking:
                return await self._look_up(wanted, asking, links, worth, began)
        except asyncio.CancelledError:
            done = False
            raise
        finally:
            del self._inflight_by_key[links[0].key]
            mine.set_result(done)

    # ---- what to ask for ------------------------------------------------------------------------------------

    async def _missing_chunks(self, wanted: FetchRequest) -> tuple[list[_ChunkSpan], int]:
        """The chunks of the asker's chain behind those that are here, and how many tokens they would add; none when
        that is too little."""
        out: list[_ChunkSpan] = []
        parent, start, turns = wanted.root, 0, YieldTimer()
        for end in wanted.chunk_ends:
            ids = wanted.ids[start * keys.TOKEN_BYTES : end * keys.TOKEN_BYTES]
            parent = keys.prefix_hash(parent, ids)
            if out or self._tiers.index.get(parent) is None:
                out.append(_ChunkSpan(parent, start, end))
                if len(out) == _MAX_CHUNKS:
                    break
            start = end
            await turns.maybe_yield()
        ahead = out[-1].end - self._num_cached_tokens(wanted) if out else 0
        return (out, ahead) if ahead >= _MIN_TOKENS else ([], 0)

    def _num_cached_tokens(self, wanted: FetchRequest) -> int:
        return sum(n for _, n in self._tiers.index.match(wanted.root, wanted.ids))

    async def _look_up(
        self, wanted: FetchRequest, asking: InflightLookup, links: list[_ChunkSpan], worth: float, began: float
    ) -> int:
        self.counters.lookups += 1
        usual = min(
            _LOOKUP_MAX_SECONDS, max(_LOOKUP_SECONDS, _LOOKUP_LATENCY_FACTOR * self._tier.latency.latency_seconds)
        )
        patience = min(usual, wanted.timeout_seconds, worth * _LOOKUP_SHARE or _LOOKUP_SECONDS)
        found = await self._tier.find(wanted.root, [link.key for link in links], patience)
        void = asking.invalidated
        if self._observe_epochs(wanted.root, found.epochs) is EpochChange.DELETION_LOST:
            return 0
        asking.invalidated = void  # what was found has the marks of after a deletion that was seen just now
        asking.keys = frozenset(entry.header.prefix_hash for entry in found.leading)
        entries = await self._verify_chain(wanted, links, found.leading)
        before = self._num_cached_tokens(wanted)
        while entries and links[len(entries) - 1].end - before < _MIN_TOKENS:
            entries.pop()
        if not entries or asking.invalidated:
            return 0
        ready = _prefill_deadlines(wanted.seconds_per_token, entries, [link.end - before for link in links])
        spent = time.perf_counter() - began
        chosen = self._num_worth_fetching(entries, ready, min(wanted.timeout_seconds, _MAX_FETCH_SECONDS) - spent)
        if not chosen:
            self._record_bypass(entries)
            return 0
        limit = min(ready[chosen - 1], wanted.timeout_seconds, _MAX_FETCH_SECONDS) - spent
        await self._download(wanted, asking, entries[:chosen], limit)
        tokens = max(0, self._num_cached_tokens(wanted) - before)
        self.counters.tokens += tokens
        self.counters.hits += tokens > 0
        return tokens

    @staticmethod
    async def _verify_chain(
        wanted: FetchRequest, links: Sequence[_ChunkSpan], entries: Sequence[RemoteRecord]
    ) -> list[RemoteRecord]:
        """Leading entries that are the asker's chunks in every respect, tokens included."""
        out: list[RemoteRecord] = []
        turns = YieldTimer()
        for link, entry in zip(links, entries, strict=False):
            await turns.maybe_yield()
            header = entry.header
            ids = wanted.ids[link.start * keys.TOKEN_BYTES : link.end * keys.TOKEN_BYTES]
            if (
                header.start_position != link.start
                or not wanted.accepts(header)
                or keys.token_bytes(header.token_ids[:]) != ids
            ):
                break
            out.append(entry)
        return out

    def _num_worth_fetching(self, entries: Sequence[RemoteRecord], ready: Sequence[float], left: float) -> int:
        """How many leading entries to bring: as many as come before they could be computed. ``ready`` says when that
        would be."""
        size = best = 0
        for n, (entry, computed) in enumerate(zip(entries, ready, strict=True), 1):
            size += entry.stored_length
            takes = self._tier.latency.estimate_seconds(size)
            if takes <= left and takes <= computed:
                best = n
        return best

    # ---- bringing -------------------------------------------------------------------------------------------

    async def _download(
        self, wanted: FetchRequest, asking: InflightLookup, entries: Sequence[RemoteRecord], limit: float
    ) -> None:
        """Downloads some groups at once, and lists their chunks in order."""
        began, size = time.perf_counter(), 0
        deadline, groups = began + limit, self._tier.group_by_call(entries)
        hold = LeaseGuard([], self._tiers.on_released)
        try:
            with self._downloads.start(groups) as downloads:
                for one in downloads:
                    if not await self._insert(wanted, asking, one, deadline, hold):
                        return
                    size += sum(entry.stored_length for entry in one.group)
        finally:
            if time.perf_counter() >= deadline:  # if nothing came, so much was too much
                size = size or sum(entry.stored_length for entry in groups[0])
            self._tier.latency.record_transfer(size, time.perf_counter() - began)
            hold.release()

    async def _insert(
        self, wanted: FetchRequest, asking: InflightLookup, one: Download, deadline: float, hold: LeaseGuard
    ) -> bool:
        """Waits for a group, places it and lets go of it. False ends the prefix."""
        payloads = await one.wait_payloads(max(0.0, deadline - time.perf_counter()))
        if payloads is None:
            self.counters.late += time.perf_counter() >= deadline
            return False
        placed = await self._inserter.insert(
            wanted, one.group, payloads, hold, lambda: asking.invalidated, delay_persist=True
        )
        one.inserted.set()
        return placed

    # ---- what is not brought --------------------------------------------------------------------------------

    def _record_bypass(self, entries: Sequence[RemoteRecord] = ()) -> None:
        """Counts a prompt that is quicker computed. Measures anew now and then, while nobody waits for it."""
        self.counters.bypassed += 1
        self._tier.demand.set()
        idle = self._measurement is None or self._measurement.done()
        if entries and idle and time.monotonic() - self._tier.latency.bandwidth_measured_at > _MEASURE_SECONDS:
            self._measurement = asyncio.create_task(self._measure(self._tier.group_by_call(entries)[0]))

    async def _measure(self, group: list[RemoteRecord]) -> None:
        began = time.perf_counter()
        try:
            await self._tier.read_payloads(group, _MEASURE_SECONDS)
        except RemoteFailed:
            return
        self._tier.latency.record_transfer(sum(e.stored_length for e in group), time.perf_counter() - began)

    async def close(self) -> None:
        """Ends what runs for nobody."""
        if self._measurement is not None:
            self._measurement.cancel()
            await asyncio.wait({self._measurement})


def _prefill_deadlines(seconds_per_token: float, entries: Sequence[RemoteRecord], tokens: Sequence[int]) -> list[float]:
    """The seconds after which the asker could have computed as far as each entry reaches, so many ``tokens``. What it
    does not know, the writers do."""
    out, known = [], 0.0
    for entry, ahead in zip(entries, tokens, strict=False):
        known += entry.header.prefill_seconds
        out.append(seconds_per_token * ahead or known or _MAX_FETCH_SECONDS)
    return out
