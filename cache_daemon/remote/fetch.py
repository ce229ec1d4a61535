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
from cache_daemon.remote.deletion_epochs import News
from cache_daemon.remote.downloads import Download, Downloads
from cache_daemon.remote.epoch_format import Marks
from cache_daemon.remote.fetch_insert import Placing
from cache_daemon.remote.remote_record import Entry
from cache_daemon.remote.remote_tier import RemoteTier
from cache_daemon.store.sessions import Hold
from cache_daemon.store.tier_manager import Tiers
from cache_daemon.store.yield_timer import Turns

# A look-up that is not answered by then, or by some times what it usually takes, is given up; of what computing costs
# it may take a part.
_LOOKUP_SECONDS, _LOOKUP_LATE, _LOOKUP_MOST_SECONDS, _LOOKUP_SHARE = 0.25, 8.0, 1.0, 0.5
# Nobody waits longer, even where nobody knows what computing costs.
_MOST_SECONDS = 10.0
# Fewer tokens are not worth asking for; more chunks than these are not asked for at once.
_LEAST_TOKENS, _MOST_CHUNKS = 16, 1024
_MEASURE_SECONDS = 5.0


@dataclass(frozen=True)
class Wanted:
    """A prompt that is looked up: ``ids`` are uint32 little-endian, ``cuts`` the rising ends of its chunks, ``price``
    what the asker computes a token in (seconds; 0: unknown), ``patience`` how long it will wait at most, ``until`` how
    long what comes is kept, on the store's clock."""

    root: bytes
    tenant: bytes
    geometry: Geometry
    ids: bytes
    cuts: Sequence[int]
    price: float
    patience: float
    until: float = inf

    def fits(self, header: ChunkHeader) -> bool:
        """Whether a chunk is the tenant's, and has the model's geometry."""
        return header.tenant == self.tenant and Geometry.of(header) == self.geometry


@dataclass(frozen=True)
class Brought:
    """Tokens that the remote tier added to the prefix, and the seconds that it took, in vain or not."""

    tokens: int = 0
    seconds: float = 0.0


@dataclass
class BringingCounts:
    """Since the start."""

    lookups: int = 0  # that asked the engine
    hits: int = 0  # that brought something
    tokens: int = 0
    bypassed: int = 0  # that were, or would have been, slower than computing
    late: int = 0  # that were cut off, since computing would have been quicker


@dataclass(eq=False)
class Asking:
    """A look-up of a tenant's chunks; ``void`` as soon as some of them are deleted. ``keys`` are those that were found,
    None while that is not known."""

    root: bytes
    void: bool = False
    keys: frozenset[bytes] | None = None


@dataclass(frozen=True)
class _Link:
    """A chunk of the asker's chain."""

    key: bytes
    start: int
    end: int


class Bringing:
    """``seen`` hears the marks that a tenant has in the engine; ``closed`` says whether a tenant's chunks must not be
    asked for."""

    def __init__(
        self,
        tiers: Tiers,
        placing: Placing,
        tier: RemoteTier,
        seen: Callable[[bytes, Marks], News],
        closed: Callable[[bytes], bool],
    ) -> None:
        self._tiers, self._placing, self._tier = tiers, placing, tier
        self._seen, self._closed = seen, closed
        self._running: dict[bytes, asyncio.Future[bool]] = {}  # the result is whether it came to its end
        self._asking: set[Asking] = set()
        self._downloads = Downloads(tier)
        self._measuring: asyncio.Task[None] | None = None
        self.counts = BringingCounts()

    async def bring(self, wanted: Wanted) -> Brought:
        """Adds to the local prefix of a prompt what the remote tier has of it. Raises nothing; whoever is cancelled
        leaves nothing behind."""
        began = time.perf_counter()
        tokens = 0
        if self._tier.reads.allows and not self._closed(wanted.root):
            try:
                tokens = await self._bring(wanted, began)
            except (RemoteFailed, TimeoutError):
                tokens = 0
        elif wanted.cuts:
            self._tier.asked.set()
        return Brought(tokens, time.perf_counter() - began)

    def forget(self, root: bytes, keys: frozenset[bytes] | None = None) -> None:
        """A tenant, or without a root everybody, has deleted something: what was found before is not brought. With
        ``keys`` it was these chunks."""
        for asking in self._asking:
            if root in (b"", asking.root) and (keys is None or asking.keys is None or keys & asking.keys):
                asking.void = True

    @contextmanager
    def asking(self, root: bytes) -> Iterator[Asking]:
        """A look-up while it lasts, which hears of deletions."""
        asking = Asking(root, self._closed(root))
        self._asking.add(asking)
        try:
            yield asking
        finally:
            self._asking.remove(asking)

    async def _bring(self, wanted: Wanted, began: float) -> int:
        links, ahead = await self._missing(wanted)
        if not links:
            return 0
        worth = wanted.price * ahead
        if worth and self._tier.figures.seconds(0, 2) > worth:
            self._bypass()
            return 0
        while (other := self._running.get(links[0].key)) is not None:
            # Somebody brings the same; what comes of it is found below, unless whoever asked for it went away.
            limit = min(wanted.patience, worth or _LOOKUP_SECONDS)
            await asyncio.wait({other}, timeout=max(0.0, began + limit - time.perf_counter()))
            if not other.done() or other.result():
                return 0
        mine, done = asyncio.get_running_loop().create_future(), True
        self._running[links[0].key] = mine
        try:
            with self.asking(wanted.root) as asking:
                return await self._look_up(wanted, asking, links, worth, began)
        except asyncio.CancelledError:
            done = False
            raise
        finally:
            del self._running[links[0].key]
            mine.set_result(done)

    # ---- what to ask for ------------------------------------------------------------------------------------

    async def _missing(self, wanted: Wanted) -> tuple[list[_Link], int]:
        """The chunks of the asker's chain behind those that are here, and how many tokens they would add; none when
        that is too little."""
        out: list[_Link] = []
        parent, start, turns = wanted.root, 0, Turns()
        for end in wanted.cuts:
            ids = wanted.ids[start * keys.TOKEN_BYTES : end * keys.TOKEN_BYTES]
            parent = keys.prefix_hash(parent, ids)
            if out or self._tiers.index.get(parent) is None:
                out.append(_Link(parent, start, end))
                if len(out) == _MOST_CHUNKS:
                    break
            start = end
            await turns.give_way()
        ahead = out[-1].end - self._covered(wanted) if out else 0
        return (out, ahead) if ahead >= _LEAST_TOKENS else ([], 0)

    def _covered(self, wanted: Wanted) -> int:
        return sum(n for _, n in self._tiers.index.match(wanted.root, wanted.ids))

    async def _look_up(self, wanted: Wanted, asking: Asking, links: list[_Link], worth: float, began: float) -> int:
        self.counts.lookups += 1
        usual = min(_LOOKUP_MOST_SECONDS, max(_LOOKUP_SECONDS, _LOOKUP_LATE * self._tier.figures.latency_seconds))
        patience = min(usual, wanted.patience, worth * _LOOKUP_SHARE or _LOOKUP_SECONDS)
        found = await self._tier.find(wanted.root, [link.key for link in links], patience)
        void = asking.void
        if self._seen(wanted.root, found.marks) is News.REVERTED:
            return 0
        asking.void = void  # what was found has the marks of after a deletion that was seen just now
        asking.keys = frozenset(entry.header.prefix_hash for entry in found.leading)
        entries = await self._fitting(wanted, links, found.leading)
        before = self._covered(wanted)
        while entries and links[len(entries) - 1].end - before < _LEAST_TOKENS:
            entries.pop()
        if not entries or asking.void:
            return 0
        ready = _computed_by(wanted.price, entries, [link.end - before for link in links])
        spent = time.perf_counter() - began
        chosen = self._choose(entries, ready, min(wanted.patience, _MOST_SECONDS) - spent)
        if not chosen:
            self._bypass(entries)
            return 0
        limit = min(ready[chosen - 1], wanted.patience, _MOST_SECONDS) - spent
        await self._fetch(wanted, asking, entries[:chosen], limit)
        tokens = max(0, self._covered(wanted) - before)
        self.counts.tokens += tokens
        self.counts.hits += tokens > 0
        return tokens

    @staticmethod
    async def _fitting(wanted: Wanted, links: Sequence[_Link], entries: Sequence[Entry]) -> list[Entry]:
        """Leading entries that are the asker's chunks in every respect, tokens included."""
        out: list[Entry] = []
        turns = Turns()
        for link, entry in zip(links, entries, strict=False):
            await turns.give_way()
            header = entry.header
            ids = wanted.ids[link.start * keys.TOKEN_BYTES : link.end * keys.TOKEN_BYTES]
            if (
                header.start_position != link.start
                or not wanted.fits(header)
                or keys.token_bytes(header.token_ids[:]) != ids
            ):
                break
            out.append(entry)
        return out

    def _choose(self, entries: Sequence[Entry], ready: Sequence[float], left: float) -> int:
        """How many leading entries to bring: as many as come before they could be computed. ``ready`` says when that
        would be."""
        size = best = 0
        for n, (entry, computed) in enumerate(zip(entries, ready, strict=True), 1):
            size += entry.stored_length
            takes = self._tier.figures.seconds(size)
            if takes <= left and takes <= computed:
                best = n
        return best

    # ---- bringing -------------------------------------------------------------------------------------------

    async def _fetch(self, wanted: Wanted, asking: Asking, entries: Sequence[Entry], limit: float) -> None:
        """Downloads some groups at once, and lists their chunks in order."""
        began, size = time.perf_counter(), 0
        deadline, groups = began + limit, self._tier.groups(entries)
        hold = Hold([], self._tiers.unused)
        try:
            with self._downloads.of(groups) as downloads:
                for one in downloads:
                    if not await self._place(wanted, asking, one, deadline, hold):
                        return
                    size += sum(entry.stored_length for entry in one.group)
        finally:
            if time.perf_counter() >= deadline:  # if nothing came, so much was too much
                size = size or sum(entry.stored_length for entry in groups[0])
            self._tier.figures.moved(size, time.perf_counter() - began)
            hold.give_back()

    async def _place(self, wanted: Wanted, asking: Asking, one: Download, deadline: float, hold: Hold) -> bool:
        """Waits for a group, places it and lets go of it. False ends the prefix."""
        payloads = await one.take(max(0.0, deadline - time.perf_counter()))
        if payloads is None:
            self.counts.late += time.perf_counter() >= deadline
            return False
        placed = await self._placing.place(wanted, one.group, payloads, hold, lambda: asking.void, awaited=True)
        one.placed.set()
        return placed

    # ---- what is not brought --------------------------------------------------------------------------------

    def _bypass(self, entries: Sequence[Entry] = ()) -> None:
        """Counts a prompt that is quicker computed. Measures anew now and then, while nobody waits for it."""
        self.counts.bypassed += 1
        self._tier.asked.set()
        idle = self._measuring is None or self._measuring.done()
        if entries and idle and time.monotonic() - self._tier.figures.moved_at > _MEASURE_SECONDS:
            self._measuring = asyncio.create_task(self._measure(self._tier.groups(entries)[0]))

    async def _measure(self, group: list[Entry]) -> None:
        began = time.perf_counter()
        try:
            await self._tier.parts(group, _MEASURE_SECONDS)
        except RemoteFailed:
            return
        self._tier.figures.moved(sum(e.stored_length for e in group), time.perf_counter() - began)

    async def close(self) -> None:
        """Ends what runs for nobody."""
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.wait({self._measuring})


def _computed_by(price: float, entries: Sequence[Entry], tokens: Sequence[int]) -> list[float]:
    """The seconds after which the asker could have computed as far as each entry reaches, so many ``tokens``. What it
    does not know, the writers do."""
    out, known = [], 0.0
    for entry, ahead in zip(entries, tokens, strict=False):
        known += entry.header.prefill_seconds
        out.append(price * ahead or known or _MOST_SECONDS)
    return out
