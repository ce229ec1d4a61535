"""Finding and leasing chunks: the one thing on the path to the first token."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

import structlog
from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import EVENT_TYPE_DELETED, EVENT_TYPE_EVICTED
from kvsidecar.chunk_layout import Geometry
from kvsidecar.errors import UnknownSession

from cache_daemon.durable.durable_tier import DurableTier, ReadJob, ReadResult
from cache_daemon.memory.arena import Slot
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.prefix_index import Found
from cache_daemon.store.sessions import Hold, Session
from cache_daemon.store.tier_manager import Tiers
from cache_daemon.store.ttl import Terms
from cache_daemon.store.yield_timer import Turns

# A full arena may be full of chunks that are being written to disk: so long a reader waits for that.
_PATIENCE_SECONDS = 0.25
# Work on the event loop goes on for so many probes before others have their turn.
_SLICE = 128
# Uses are counted when the answer is on its way, so few at a time that the next request hardly waits.
_TOUCH_AFTER_SECONDS, _TOUCHES = 0.002, 32

log = structlog.get_logger("cache_daemon")

# Windows that are looked for in one prompt.
_WINDOWS = 4

# Parts of a prompt, each ``(start, tokens)``.
Stretches = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class MatchResult:
    """The longest stored prefix, behind ``passed_tokens`` that are not wanted, and chunks found by content, each with
    its place in the prompt; under one lease."""

    matches: tuple[Found, ...]
    passed_tokens: int = 0
    contents: tuple[tuple[int, Found], ...] = ()
    promoted_tokens: int = 0
    promote_ms: float = 0.0
    lease_id: bytes = b""


class Lookup:
    """``durable`` is read on ``in_thread``; ``progress`` waits until the durable writer has let go of something."""

    def __init__(
        self,
        tiers: Tiers,
        terms: Terms,
        durable: DurableTier | None,
        in_thread: Callable[[Callable[[], list[ReadResult]]], Awaitable[list[ReadResult]]],
        progress: Callable[[float], Awaitable[bool]],
    ) -> None:
        self._tiers, self._terms, self._durable = tiers, terms, durable
        self._in_thread, self._progress = in_thread, progress
        self._touched: deque[Chunk] = deque()

    def probe(self, root: bytes, ids: bytes) -> list[Found]:
        """The longest stored prefix without leases."""
        return self._fresh(self._tiers.index.match(root, ids))

    async def match(
        self,
        session: Session,
        root: bytes,
        ids: bytes,
        contents: Stretches = (),
        window: int = 0,
        until: float = inf,
    ) -> MatchResult:
        """Leases the longest stored prefix of ``ids`` (uint32 little-endian), bringing it into the arena where it is
        not, and chunks whose tokens are those of a stretch ``(start, tokens)`` of ``contents`` that reaches beyond it.
        With a ``window``, of the prefix only what has one of the last so many tokens. All that is found is kept
        ``until`` then, on the store's clock.

        What cannot be brought in (corrupt, no room) ends the prefix; that is never an error. Raises UnknownSession when
        the session ended meanwhile. Whoever is cancelled holds nothing.
        """
        limit: int | None = None  # where it ends was not there: another window is wanted, and then none
        for _ in range(_WINDOWS):
            result, limit = await self._match(session, root, ids, contents, window, until, limit)
            if result is not None:
                return result
        result, _ = await self._match(session, root, ids, contents, 0, until, 0)
        assert result is not None
        return result

    async def _match(
        self,
        session: Session,
        root: bytes,
        ids: bytes,
        contents: Stretches,
        window: int,
        until: float,
        limit: int | None,
    ) -> tuple[MatchResult | None, int]:
        """The same of a prefix of at most ``limit`` tokens, and where it ends; None when that is earlier than the
        window was taken for."""
        known = ids if limit is None else ids[: limit * keys.TOKEN_BYTES]
        found = self._of_layout(session, self._fresh(self._tiers.index.match(root, known)))
        covered, passed = sum(n for _, n in found), _passed(found, window)
        prefix, behind = found[passed:], sum(n for _, n in found[:passed])
        hold = Hold([c for c, _ in prefix], self._tiers.unused)
        try:
            if len(prefix) > _SLICE:
                await asyncio.sleep(0)
            elsewhere = await self._by_content(session, root, ids, contents, covered)
            hold.add([c for _, c, _ in elsewhere])
            wanted = dict.fromkeys(hold.chunks)
            missing = [c for c in wanted if c.in_arena is not Residency.PRESENT]
            began = time.perf_counter()
            if missing:
                await self._bring(missing)
            if len(prefix) > _SLICE:
                await asyncio.sleep(0)
            promote_ms = (time.perf_counter() - began) * 1e3 if missing else 0.0
            if session.closed:
                raise UnknownSession("the session ended while its request was served; call Attach again")
            matches = self._usable(prefix)
            end = behind + sum(m.tokens for m in matches)
            if passed and len(matches) < len(prefix):
                hold.give_back()
                return None, end
            placed = tuple((start, Found(c, n)) for start, c, n in elsewhere if _readable(c))
            hold.keep([*(m.chunk for m in matches), *(m.chunk for _, m in placed)])
            fresh = set(map(id, missing))
            promoted = sum(m.tokens for m in matches if id(m.chunk) in fresh) if fresh else 0
            self._count(ids, behind, matches, placed, promoted)
        except BaseException:  # the caller went away, or hears of an error: nobody will ever release these
            hold.give_back()
            raise
        lease_id = session.lease(hold) if hold.chunks else b""
        used = [*(c for c, _ in found[:passed] if c.listed), *(m.chunk for m in matches)]
        self._touch_later(used, [m.chunk for _, m in placed])
        for chunk in (*used[-1:], *(m.chunk for _, m in placed)):
            self._terms.keep(chunk, until)
        return MatchResult(matches, behind, placed, promoted, promote_ms, lease_id), end

    async def hold(self, chunk: Chunk) -> Hold | None:
        """Keeps one chunk in the arena; None when it cannot be brought in."""
        hold = Hold([chunk], self._tiers.unused)
        try:
            if chunk.in_arena is not Residency.PRESENT:
                await self._bring([chunk])
        except BaseException:
            hold.give_back()
            raise
        if _readable(chunk):
            self._touch_later([chunk], [])
            return hold
        hold.give_back()
        return None

    # ---- parts ----------------------------------------------------------------------------------------------

    def _fresh(self, found: list[Found]) -> list[Found]:
        """What is found, without chunks whose time to live has passed; those go."""
        if not found or (found[0][0].tenant.limits.ttl_seconds is None and found[-1][0].kept_until == inf):
            return found
        now = self._tiers.clock()
        for i, (chunk, _) in enumerate(found):
            if chunk.expired(now):
                self._tiers.counts.expired_chunks += self._tiers.drop(chunk, EVENT_TYPE_EVICTED)
                return found[:i]
        return found

    def _of_layout(self, session: Session, found: list[Found]) -> list[Found]:
        """What is found, unless its layout is not the session's: an archive may have said so, whose root nobody can
        undo. All chunks of a root have one layout, and those are dropped."""
        if not found or Geometry.of(found[0].chunk.header) == session.geometry:
            return found
        dropped = self._tiers.drop(found[0].chunk, EVENT_TYPE_DELETED)
        self._tiers.counts.corrupt_chunks += dropped
        log.error("chunks of another layout than their namespace's were dropped", chunks=dropped, client=session.name)
        return []

    async def _by_content(
        self, session: Session, root: bytes, ids: bytes, contents: Stretches, covered: int
    ) -> list[tuple[int, Chunk, int]]:
        turns = Turns()
        found = []
        for start, count in contents:
            await turns.give_way()
            if start + count > covered:
                stretch = ids[start * keys.TOKEN_BYTES : (start + count) * keys.TOKEN_BYTES]
                chunk = self._tiers.index.find_content(keys.content_hash(root, stretch), stretch)
                if chunk is not None and self._of_layout(session, self._fresh([Found(chunk, count)])):
                    found.append((start, chunk, count))
        return [(start, c, n) for start, c, n in found if c.listed]

    @staticmethod
    def _usable(found: Sequence[Found]) -> tuple[Found, ...]:
        """The leading chunks that are in the arena."""
        usable = 0
        while usable < len(found) and _readable(found[usable].chunk):
            usable += 1
        return tuple(found[:usable])

    async def _bring(self, chunks: Sequence[Chunk]) -> None:
        """Brings held chunks into the arena, in order, until one does not fit."""
        jobs: list[tuple[Chunk, Slot]] = []
        waits: list[asyncio.Future[None]] = []
        try:
            for chunk in chunks:
                if chunk.in_arena is Residency.PRESENT:
                    continue
                if chunk.arrival is not None:
                    waits.append(chunk.arrival)
                    continue
                slot = await self._room(chunk)
                if chunk.in_arena is not Residency.ABSENT or not chunk.listed:  # somebody was faster
                    if slot is not None:
                        self._tiers.give_back(slot)
                    if chunk.arrival is not None:
                        waits.append(chunk.arrival)
                    continue
                if slot is None:
                    break
                chunk.in_arena, chunk.arrival = Residency.ARRIVING, asyncio.get_running_loop().create_future()
                jobs.append((chunk, slot))
        finally:
            # Shielded: a caller that goes away must not leave half-loaded chunks behind.
            loading = asyncio.ensure_future(self._load(jobs)) if jobs else None
        if loading is not None:
            await asyncio.shield(loading)
        if waits:
            await asyncio.wait(waits)

    async def _room(self, chunk: Chunk) -> Slot | None:
        slot = self._tiers.allocate(chunk.size_bytes, chunk.tenant)
        if slot is None and await self._progress(_PATIENCE_SECONDS):
            slot = self._tiers.allocate(chunk.size_bytes, chunk.tenant)
        return slot

    async def _load(self, jobs: Sequence[tuple[Chunk, Slot]]) -> None:
        durable = self._durable
        assert durable is not None

        def read() -> list[ReadResult]:
            direct = [self._tiers.arena.direct(slot) for _, slot in jobs]
            targets = [
                view if view is not None else memoryview(bytearray(slot.size_bytes))
                for view, (_, slot) in zip(direct, jobs, strict=True)
            ]
            found = durable.read(
                [ReadJob(c.key, t, c.header.checksum) for (c, _), t in zip(jobs, targets, strict=True)]
            )
            for view, target, (_, slot), result in zip(direct, targets, jobs, found, strict=True):
                if view is None and result is ReadResult.SOUND:
                    self._tiers.arena.write(slot, target)
            return found

        outcomes = [ReadResult.FAILED] * len(jobs)
        try:
            outcomes = await self._in_thread(read)
        finally:
            for (chunk, slot), outcome in zip(jobs, outcomes, strict=True):
                self._loaded(chunk, slot, outcome)

    def _loaded(self, chunk: Chunk, slot: Slot, outcome: ReadResult) -> None:
        arrival, chunk.arrival = chunk.arrival, None
        chunk.in_arena = Residency.ABSENT
        if outcome is ReadResult.SOUND:
            self._tiers.arrived_in_arena(chunk, slot)
        else:
            self._tiers.give_back(slot)
            if outcome is not ReadResult.FAILED and chunk.listed:
                self._tiers.counts.corrupt_chunks += 1
                self._tiers.drop(chunk, EVENT_TYPE_DELETED)
        self._tiers.unused(chunk)
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    def _count(
        self, ids: bytes, behind: int, matches: Sequence[Found], placed: Sequence[tuple[int, Found]], promoted: int
    ) -> None:
        counts = self._tiers.counts
        counts.matches += 1
        counts.requested_tokens += len(ids) // keys.TOKEN_BYTES
        counts.matched_tokens += behind + sum(m.tokens for m in matches)
        counts.promoted_tokens += promoted
        counts.content_tokens += sum(m.tokens for _, m in placed)

    def _touch_later(self, path: list[Chunk], elsewhere: list[Chunk]) -> None:
        """Notes a use, and tells the tiers of it once the answer is on its way."""
        now = self._tiers.clock()
        for chunk in (*path, *elsewhere):
            chunk.hits += 1
            chunk.used_at = now
        if not self._touched:
            asyncio.get_running_loop().call_later(_TOUCH_AFTER_SECONDS, self._touch_some)
        # Parents count as used after their children, which they outlive.
        self._touched.extend(reversed(path))
        self._touched.extend(elsewhere)

    def _touch_some(self) -> None:
        self._touch(_TOUCHES)
        if self._touched:
            asyncio.get_running_loop().call_soon(self._touch_some)

    def touch_all(self) -> None:
        """Tells the tiers of every use that they have not yet heard of."""
        self._touch(len(self._touched))

    def _touch(self, most: int) -> None:
        for _ in range(min(most, len(self._touched))):
            self._tiers.touch(self._touched.popleft())


def _passed(found: Sequence[Found], window: int) -> int:
    """How many leading chunks end before the last ``window`` tokens of those that are found whole."""
    if not window:
        return 0
    ends = list(accumulate(n for _, n in found))
    whole = [end for end, (chunk, n) in zip(ends, found, strict=True) if n == chunk.tokens]
    return sum(end <= whole[-1] - window for end in ends) if whole else 0


def _readable(chunk: Chunk) -> bool:
    return chunk.in_arena is Residency.PRESENT and chunk.listed
