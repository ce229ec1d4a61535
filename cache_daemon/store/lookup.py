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
from cache_daemon.store.prefix_index import MatchedChunk
from cache_daemon.store.sessions import LeaseGuard, Session
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.ttl import TtlIndex
from cache_daemon.store.yield_timer import YieldTimer

# A full arena may be full of chunks that are being written to disk: so long a reader waits for that.
_ARENA_WAIT_SECONDS = 0.25
# Work on the event loop goes on for so many probes before others have their turn.
_SLICE = 128
# Uses are counted when the answer is on its way, so few at a time that the next request hardly waits.
_TOUCH_AFTER_SECONDS, _MAX_TOUCHES = 0.002, 32

log = structlog.get_logger("cache_daemon")

# Windows that are looked for in one prompt.
_MAX_WINDOW_TRIES = 4

# Parts of a prompt, each ``(start, tokens)``.
TokenRanges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class MatchResult:
    """The longest stored prefix, behind ``passed_tokens`` that are not wanted, and chunks found by content, each with
    its place in the prompt; under one lease."""

    matches: tuple[MatchedChunk, ...]
    passed_tokens: int = 0
    contents: tuple[tuple[int, MatchedChunk], ...] = ()
    promoted_tokens: int = 0
    promote_ms: float = 0.0
    lease_id: bytes = b""


class Lookup:
    """``durable`` is read on ``in_thread``; ``progress`` waits until the durable writer has let go of something."""

    def __init__(
        self,
        tiers: TierManager,
        ttl: TtlIndex,
        durable: DurableTier | None,
        in_thread: Callable[[Callable[[], list[ReadResult]]], Awaitable[list[ReadResult]]],
        wait_progress: Callable[[float], Awaitable[bool]],
    ) -> None:
        self._tiers, self._ttl, self._durable = tiers, ttl, durable
        self._in_thread, self._wait_progress = in_thread, wait_progress
        self._pending_touches: deque[Chunk] = deque()

    def probe(self, root: bytes, ids: bytes) -> list[MatchedChunk]:
        """The longest stored prefix without leases."""
        return self._drop_expired(self._tiers.index.match(root, ids))

    async def match(
        self,
        session: Session,
        root: bytes,
        ids: bytes,
        contents: TokenRanges = (),
        window: int = 0,
        expires_at: float = inf,
    ) -> MatchResult:
        """Leases the longest stored prefix of ``ids`` (uint32 little-endian), bringing it into the arena where it is
        not, and chunks whose tokens are those of a stretch ``(start, tokens)`` of ``contents`` that reaches beyond it.
        With a ``window``, of the prefix only what has one of the last so many tokens. All that is found is kept
        ``until`` then, on the store's clock.

        What cannot be brought in (corrupt, no room) ends the prefix; that is never an error. Raises UnknownSession when
        the session ended meanwhile. Whoever is cancelled holds nothing.
        """
        limit: int | None = None  # where it ends was not there: another window is wanted, and then none
        for _ in range(_MAX_WINDOW_TRIES):
            result, limit = await self._match(session, root, ids, contents, window, expires_at, limit)
            if result is not None:
                return result
        result, _ = await self._match(session, root, ids, contents, 0, expires_at, 0)
        assert result is not None
        return result

    async def _match(
        self,
        session: Session,
        root: bytes,
        ids: bytes,
        contents: TokenRanges,
        window: int,
        expires_at: float,
        limit: int | None,
    ) -> tuple[MatchResult | None, int]:
        """The same of a prefix of at most ``limit`` tokens, and where it ends; None when that is earlier than the
        window was taken for."""
        known = ids if limit is None else ids[: limit * keys.TOKEN_BYTES]
        found = self._drop_other_layout(session, self._drop_expired(self._tiers.index.match(root, known)))
        covered, passed = sum(n for _, n in found), _num_outside_window(found, window)
        prefix, behind = found[passed:], sum(n for _, n in found[:passed])
        hold = LeaseGuard([c for c, _ in prefix], self._tiers.on_released)
        try:
            if len(prefix) > _SLICE:
                await asyncio.sleep(0)
            elsewhere = await self._match_contents(session, root, ids, contents, covered)
            hold.add([c for _, c, _ in elsewhere])
            wanted = dict.fromkeys(hold.chunks)
            missing = [c for c in wanted if c.arena_state is not Residency.PRESENT]
            began = time.perf_counter()
            if missing:
                await self._promote(missing)
            if len(prefix) > _SLICE:
                await asyncio.sleep(0)
            promote_ms = (time.perf_counter() - began) * 1e3 if missing else 0.0
            if session.closed:
                raise UnknownSession("the session ended while its request was served; call Attach again")
            matches = self._usable(prefix)
            end = behind + sum(m.tokens for m in matches)
            if passed and len(matches) < len(prefix):
                hold.release()
                return None, end
            placed = tuple((start, MatchedChunk(c, n)) for start, c, n in elsewhere if _is_readable(c))
            hold.retain_only([*(m.chunk for m in matches), *(m.chunk for _, m in placed)])
            fresh = set(map(id, missing))
            promoted = sum(m.tokens for m in matches if id(m.chunk) in fresh) if fresh else 0
            self._count(ids, behind, matches, placed, promoted)
        except BaseException:  # the caller went away, or hears of an error: nobody will ever release these
            hold.release()
            raise
        lease_id = session.add_lease(hold) if hold.chunks else b""
        used = [*(c for c, _ in found[:passed] if c.indexed), *(m.chunk for m in matches)]
        self._record_use(used, [m.chunk for _, m in placed])
        for chunk in (*used[-1:], *(m.chunk for _, m in placed)):
            self._ttl.extend(chunk, expires_at)
        return MatchResult(matches, behind, placed, promoted, promote_ms, lease_id), end

    async def acquire(self, chunk: Chunk) -> LeaseGuard | None:
        """Keeps one chunk in the arena; None when it cannot be brought in."""
        hold = LeaseGuard([chunk], self._tiers.on_released)
        try:
            if chunk.arena_state is not Residency.PRESENT:
                await self._promote([chunk])
        except BaseException:
            hold.release()
            raise
        if _is_readable(chunk):
            self._record_use([chunk], [])
            return hold
        hold.release()
        return None

    # ---- parts ----------------------------------------------------------------------------------------------

    def _drop_expired(self, found: list[MatchedChunk]) -> list[MatchedChunk]:
        """What is found, without chunks whose time to live has passed; those go."""
        if not found or (found[0][0].tenant.limits.ttl_seconds is None and found[-1][0].expires_at == inf):
            return found
        now = self._tiers.clock()
        for i, (chunk, _) in enumerate(found):
            if chunk.is_expired(now):
                self._tiers.counters.expired_chunks += self._tiers.remove_subtree(chunk, EVENT_TYPE_EVICTED)
                return found[:i]
        return found

    def _drop_other_layout(self, session: Session, found: list[MatchedChunk]) -> list[MatchedChunk]:
        """What is found, unless its layout is not the session's: an archive may have said so, whose root nobody can
        undo. All chunks of a root have one layout, and those are dropped."""
        if not found or Geometry.of(found[0].chunk.header) == session.geometry:
            return found
        dropped = self._tiers.remove_subtree(found[0].chunk, EVENT_TYPE_DELETED)
        self._tiers.counters.corrupt_chunks += dropped
        log.error("chunks of another layout than their namespace's were dropped", chunks=dropped, client=session.name)
        return []

    async def _match_contents(
        self, session: Session, root: bytes, ids: bytes, contents: TokenRanges, covered: int
    ) -> list[tuple[int, Chunk, int]]:
        turns = YieldTimer()
        found = []
        for start, count in contents:
            await turns.maybe_yield()
            if start + count > covered:
                stretch = ids[start * keys.TOKEN_BYTES : (start + count) * keys.TOKEN_BYTES]
                chunk = self._tiers.index.find_by_content(keys.content_hash(root, stretch), stretch)
                if chunk is not None and self._drop_other_layout(
                    session, self._drop_expired([MatchedChunk(chunk, count)])
                ):
                    found.append((start, chunk, count))
        return [(start, c, n) for start, c, n in found if c.indexed]

    @staticmethod
    def _usable(found: Sequence[MatchedChunk]) -> tuple[MatchedChunk, ...]:
        """The leading chunks that are in the arena."""
        usable = 0
        while usable < len(found) and _is_readable(found[usable].chunk):
            usable += 1
        return tuple(found[:usable])

    async def _promote(self, chunks: Sequence[Chunk]) -> None:
        """Brings held chunks into the arena, in order, until one does not fit."""
        jobs: list[tuple[Chunk, Slot]] = []
        waits: list[asyncio.Future[None]] = []
        try:
            for chunk in chunks:
                if chunk.arena_state is Residency.PRESENT:
                    continue
                if chunk.load_future is not None:
                    waits.append(chunk.load_future)
                    continue
                slot = await self._allocate(chunk)
                if chunk.arena_state is not Residency.ABSENT or not chunk.indexed:  # somebody was faster
                    if slot is not None:
                        self._tiers.release_slot(slot)
                    if chunk.load_future is not None:
                        waits.append(chunk.load_future)
                    continue
                if slot is None:
                    break
                chunk.arena_state, chunk.load_future = Residency.IN_FLIGHT, asyncio.get_running_loop().create_future()
                jobs.append((chunk, slot))
        finally:
            # Shielded: a caller that goes away must not leave half-loaded chunks behind.
            loading = asyncio.ensure_future(self._load(jobs)) if jobs else None
        if loading is not None:
            await asyncio.shield(loading)
        if waits:
            await asyncio.wait(waits)

    async def _allocate(self, chunk: Chunk) -> Slot | None:
        slot = self._tiers.allocate(chunk.size_bytes, chunk.tenant)
        if slot is None and await self._wait_progress(_ARENA_WAIT_SECONDS):
            slot = self._tiers.allocate(chunk.size_bytes, chunk.tenant)
        return slot

    async def _load(self, jobs: Sequence[tuple[Chunk, Slot]]) -> None:
        durable = self._durable
        assert durable is not None

        def read() -> list[ReadResult]:
            direct = [self._tiers.arena.writable_view(slot) for _, slot in jobs]
            targets = [
                view if view is not None else memoryview(bytearray(slot.size_bytes))
                for view, (_, slot) in zip(direct, jobs, strict=True)
            ]
            found = durable.read(
                [ReadJob(c.key, t, c.header.checksum) for (c, _), t in zip(jobs, targets, strict=True)]
            )
            for view, target, (_, slot), result in zip(direct, targets, jobs, found, strict=True):
                if view is None and result is ReadResult.OK:
                    self._tiers.arena.write(slot, target)
            return found

        outcomes = [ReadResult.FAILED] * len(jobs)
        try:
            outcomes = await self._in_thread(read)
        finally:
            for (chunk, slot), outcome in zip(jobs, outcomes, strict=True):
                self._finish_load(chunk, slot, outcome)

    def _finish_load(self, chunk: Chunk, slot: Slot, outcome: ReadResult) -> None:
        arrival, chunk.load_future = chunk.load_future, None
        chunk.arena_state = Residency.ABSENT
        if outcome is ReadResult.OK:
            self._tiers.finish_load(chunk, slot)
        else:
            self._tiers.release_slot(slot)
            if outcome is not ReadResult.FAILED and chunk.indexed:
                self._tiers.counters.corrupt_chunks += 1
                self._tiers.remove_subtree(chunk, EVENT_TYPE_DELETED)
        self._tiers.on_released(chunk)
        if arrival is not None and not arrival.done():
            arrival.set_result(None)

    def _count(
        self,
        ids: bytes,
        behind: int,
        matches: Sequence[MatchedChunk],
        placed: Sequence[tuple[int, MatchedChunk]],
        promoted: int,
    ) -> None:
        counts = self._tiers.counters
        counts.matches += 1
        counts.requested_tokens += len(ids) // keys.TOKEN_BYTES
        counts.matched_tokens += behind + sum(m.tokens for m in matches)
        counts.promoted_tokens += promoted
        counts.content_tokens += sum(m.tokens for _, m in placed)

    def _record_use(self, path: list[Chunk], elsewhere: list[Chunk]) -> None:
        """Notes a use, and tells the tiers of it once the answer is on its way."""
        now = self._tiers.clock()
        for chunk in (*path, *elsewhere):
            chunk.hits += 1
            chunk.last_used_at = now
        if not self._pending_touches:
            asyncio.get_running_loop().call_later(_TOUCH_AFTER_SECONDS, self._apply_some_touches)
        # Parents count as used after their children, which they outlive.
        self._pending_touches.extend(reversed(path))
        self._pending_touches.extend(elsewhere)

    def _apply_some_touches(self) -> None:
        self._apply_touches(_MAX_TOUCHES)
        if self._pending_touches:
            asyncio.get_running_loop().call_soon(self._apply_some_touches)

    def apply_all_touches(self) -> None:
        """Tells the tiers of every use that they have not yet heard of."""
        self._apply_touches(len(self._pending_touches))

    def _apply_touches(self, limit: int) -> None:
        for _ in range(min(limit, len(self._pending_touches))):
            self._tiers.touch(self._pending_touches.popleft())


def _num_outside_window(found: Sequence[MatchedChunk], window: int) -> int:
    """How many leading chunks end before the last ``window`` tokens of those that are found whole."""
    if not window:
        return 0
    ends = list(accumulate(n for _, n in found))
    whole = [end for end, (chunk, n) in zip(ends, found, strict=True) if n == chunk.tokens]
    return sum(end <= whole[-1] - window for end in ends) if whole else 0


def _is_readable(chunk: Chunk) -> bool:
    return chunk.arena_state is Residency.PRESENT and chunk.indexed
