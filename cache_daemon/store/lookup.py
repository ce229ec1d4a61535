"""Lookup: longest prefix match and content match, with leases on the matched chunks.

Requests wait for a lookup before their first token, so slow bookkeeping happens after the response.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

import structlog
from kvsidecar import keys
from kvsidecar.byte_sizes import format_size
from kvsidecar.chunk_layout import Geometry
from kvsidecar.errors import LimitExceeded, UnknownSession

from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.hint_applier import HintApplier
from cache_daemon.store.lease_pin_limits import LeasePinLimit
from cache_daemon.store.leases import LeaseGuard
from cache_daemon.store.loss_cause import LossCause
from cache_daemon.store.prefix_index import MatchedChunk
from cache_daemon.store.promoter import Promoter
from cache_daemon.store.prompt_hints import NO_HINTS, PromptHints
from cache_daemon.store.sessions import Session
from cache_daemon.store.tier_manager import TierManager
from cache_daemon.store.yield_timer import YieldTimer

# Number of chunks handled before other work runs on the event loop.
_SLICE = 128
# The eviction policies get the uses after the response was sent, in batches that are too small to delay the next
# request.
_TOUCH_AFTER_SECONDS, _MAX_TOUCHES = 0.002, 32

log = structlog.get_logger("cache_daemon")

# Maximal number of windows that are tried for one prompt.
_MAX_WINDOW_TRIES = 4

# Ranges of a prompt, each ``(start, tokens)``.
TokenRanges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class FetchHints:
    """Limits of a fetch from the remote tier; without ``chunk_ends`` nothing is fetched.

    ``chunk_ends`` are the ascending ends of the prompt's chunks in tokens, ``seconds_per_token`` is the caller's
    prefill cost (0: unknown), and ``timeout_seconds`` is the longest time that the caller waits.
    """

    chunk_ends: Sequence[int] = ()
    seconds_per_token: float = 0.0
    timeout_seconds: float = 0.0


@dataclass(frozen=True)
class MatchResult:
    """Longest stored prefix and content matches, under one lease.

    The prefix starts after ``passed_tokens``, which are outside the window. ``contents`` are pairs ``(start, match)``;
    ``start`` is the position in the prompt. ``fetched_tokens`` is the number of tokens fetched from the remote tier, in
    ``fetch_ms``. ``load_slower`` is ``FetchResult.load_slower``.
    """

    matches: tuple[MatchedChunk, ...]
    passed_tokens: int = 0
    contents: tuple[tuple[int, MatchedChunk], ...] = ()
    promoted_tokens: int = 0
    promote_ms: float = 0.0
    lease_id: bytes = b""
    fetched_tokens: int = 0
    fetch_ms: float = 0.0
    load_slower: bool = False

    @property
    def matched_tokens(self) -> int:
        """Tokens of the prefix, including tokens outside the window."""
        return self.passed_tokens + sum(m.tokens for m in self.matches)


class Lookup:
    """Finds chunks, promotes them to the arena and leases them. Runs on the event loop."""

    def __init__(
        self,
        tiers: TierManager,
        hints: HintApplier,
        promoter: Promoter,
    ) -> None:
        self._tiers, self._hints, self._promoter = tiers, hints, promoter
        self._pending_touches: deque[Chunk] = deque()

    def probe(self, root: bytes, ids: bytes) -> list[MatchedChunk]:
        """Return the longest stored prefix without leases."""
        return self._drop_expired(self._tiers.index.match(root, ids))

    async def match(
        self,
        session: Session,
        root: bytes,
        ids: bytes,
        contents: TokenRanges = (),
        window: int = 0,
        hints: PromptHints = NO_HINTS,
    ) -> MatchResult:
        """Lease the longest stored prefix of a prompt, and promote it to the arena.

        ``ids`` are uint32 little-endian. Also leases chunks whose tokens equal a range ``(start, tokens)`` of
        ``contents`` that ends after the prefix. With a ``window``, leases only the chunks of the prefix that contain
        one of its last ``window`` tokens. ``hints`` apply to all matched chunks.

        The prefix ends, without an error, before a chunk that cannot be promoted (corrupt, arena full) or that exceeds
        an external caller's share of the arena. Raises UnknownSession when the session ended meanwhile. A cancelled
        caller keeps no leases.
        """
        limit: int | None = None  # if the prefix ends before its window, try another window, and at last no window
        for _ in range(_MAX_WINDOW_TRIES):
            result, limit = await self._match(session, root, ids, contents, window, hints, limit)
            if result is not None:
                return result
        result, _ = await self._match(session, root, ids, contents, 0, hints, limit)
        assert result is not None
        return result

    async def _match(
        self,
        session: Session,
        root: bytes,
        ids: bytes,
        contents: TokenRanges,
        window: int,
        hints: PromptHints,
        limit: int | None,
    ) -> tuple[MatchResult | None, int]:
        """Match at most ``limit`` tokens. Returns the result and the end of the prefix.

        The result is None when the usable prefix is shorter than the prefix for which the window was chosen.
        """
        known = ids if limit is None else ids[: limit * keys.TOKEN_BYTES]
        found = self._drop_other_layout(session, self._drop_expired(self._tiers.index.match(root, known)))
        num_matched, passed = sum(n for _, n in found), _num_outside_window(found, window)
        prefix, num_passed = found[passed:], sum(n for _, n in found[:passed])
        leasable = prefix[: self._num_leasable(session, [c for c, _ in prefix])]
        lease = LeaseGuard([c for c, _ in leasable], self._tiers.on_released, session.usage)
        try:
            if len(prefix) > _SLICE:
                await asyncio.sleep(0)
            content_hits = await self._match_contents(session, root, ids, contents, num_matched)
            content_hits = content_hits[: self._num_leasable(session, [c for _, c, _ in content_hits])]
            lease.add([c for _, c, _ in content_hits])
            wanted = dict.fromkeys(lease.chunks)
            missing = [c for c in wanted if c.arena_state is not Residency.PRESENT]
            began = time.perf_counter()
            if missing:
                await self._promoter.promote(missing)
            if len(prefix) + len(content_hits) > _SLICE:
                await asyncio.sleep(0)
            promote_ms = (time.perf_counter() - began) * 1e3 if missing else 0.0
            if session.closed:
                raise UnknownSession("the session ended while its request was served; call Attach again")
            matches = self._usable(leasable)
            end = num_passed + sum(m.tokens for m in matches)
            if passed and len(matches) < len(prefix):
                lease.release()
                return None, end
            content_matches = tuple((start, MatchedChunk(c, n)) for start, c, n in content_hits if c.is_readable)
            lease.retain_only([*(m.chunk for m in matches), *(m.chunk for _, m in content_matches)])
            missing_ids = set(map(id, missing))
            promoted = sum(m.tokens for m in matches if id(m.chunk) in missing_ids) if missing_ids else 0
            self._count(ids, num_passed, matches, content_matches, promoted)
        except BaseException:  # the caller was cancelled or gets an error, so it will never release these leases
            lease.release()
            raise
        lease_id = session.add_lease(lease) if lease.chunks else b""
        used = [*(c for c, _ in found[:passed] if c.indexed), *(m.chunk for m in matches)]
        self._record_use(used, [m.chunk for _, m in content_matches])
        self._hints.record_match(used, [(start, m.chunk) for start, m in content_matches], hints)
        return MatchResult(matches, num_passed, content_matches, promoted, promote_ms, lease_id), end

    async def acquire(self, chunk: Chunk, usage: LeasePinLimit | None = None) -> LeaseGuard | None:
        """Lease one chunk in the arena, which counts as no use; None when it cannot be promoted.

        ``usage`` counts an external caller's leases. Raises LimitExceeded when the caller already leases too much.
        """
        if usage is not None and not usage.num_fitting([chunk]):
            raise LimitExceeded(
                f"a caller may lease {format_size(usage.max_bytes)} of the arena; this one leases "
                f"{format_size(usage.size_bytes)}, and the chunk has {format_size(chunk.size_bytes)}: release "
                "leases, or wait for other calls"
            )
        lease = LeaseGuard([chunk], self._tiers.on_released, usage)
        try:
            if chunk.arena_state is not Residency.PRESENT:
                await self._promoter.promote([chunk])
        except BaseException:
            lease.release()
            raise
        if chunk.is_readable:
            return lease
        lease.release()
        return None

    def record_read(self, chunk: Chunk) -> None:
        """Record that a caller without a session uses a chunk."""
        self._record_use([chunk], [])
        self._hints.leave_groups(chunk)

    # ---- helpers --------------------------------------------------------------------------------------------

    def _drop_expired(self, found: list[MatchedChunk]) -> list[MatchedChunk]:
        """Cut a match at the first expired chunk, and remove that chunk."""
        if not found or (found[0][0].tenant.limits.ttl_seconds is None and found[-1][0].expires_at == inf):
            return found
        now = self._tiers.clock()
        for i, (chunk, _) in enumerate(found):
            if chunk.is_expired(now):
                self._tiers.counters.expired_chunks += self._tiers.remove_subtree(chunk, LossCause.EXPIRED)
                return found[:i]
        return found

    def _drop_other_layout(self, session: Session, found: list[MatchedChunk]) -> list[MatchedChunk]:
        """Return nothing for a match with another layout than the session's, and remove its chunks.

        An imported archive may claim any root for its chunks, which cannot be verified. All valid chunks of a root have
        the same layout.
        """
        if not found or Geometry.of(found[0].chunk.header) == session.geometry:
            return found
        dropped = self._tiers.remove_subtree(found[0].chunk, LossCause.CORRUPT)
        self._tiers.counters.corrupt_chunks += dropped
        log.error("removed chunks with another layout than their namespace's", chunks=dropped, client=session.name)
        return []

    async def _match_contents(
        self, session: Session, root: bytes, ids: bytes, contents: TokenRanges, num_matched: int
    ) -> list[tuple[int, Chunk, int]]:
        turns = YieldTimer()
        found = []
        for start, count in contents:
            await turns.maybe_yield()
            if start + count > num_matched:
                stretch = ids[start * keys.TOKEN_BYTES : (start + count) * keys.TOKEN_BYTES]
                chunk = self._tiers.index.contents.find(keys.content_hash(root, stretch), stretch)
                if chunk is not None and self._drop_other_layout(
                    session, self._drop_expired([MatchedChunk(chunk, count)])
                ):
                    found.append((start, chunk, count))
        return [(start, c, n) for start, c, n in found if c.indexed]

    @staticmethod
    def _num_leasable(session: Session, chunks: Sequence[Chunk]) -> int:
        """Return the number of leading chunks that the session's caller may lease."""
        return len(chunks) if session.usage is None else session.usage.num_fitting(chunks)

    @staticmethod
    def _usable(found: Sequence[MatchedChunk]) -> tuple[MatchedChunk, ...]:
        """Return the leading chunks that are in the arena."""
        usable = 0
        while usable < len(found) and found[usable].chunk.is_readable:
            usable += 1
        return tuple(found[:usable])

    def _count(
        self,
        ids: bytes,
        num_passed: int,
        matches: Sequence[MatchedChunk],
        content_matches: Sequence[tuple[int, MatchedChunk]],
        promoted: int,
    ) -> None:
        counts = self._tiers.counters
        counts.matches += 1
        counts.requested_tokens += len(ids) // keys.TOKEN_BYTES
        counts.matched_tokens += num_passed + sum(m.tokens for m in matches)
        counts.promoted_tokens += promoted
        counts.content_tokens += sum(m.tokens for _, m in content_matches)

    def _record_use(self, path: list[Chunk], contents: list[Chunk]) -> None:
        """Count a use now; tell the eviction policies after the response."""
        now = self._tiers.clock()
        self._tiers.record_use((*path, *contents), now, is_hit=True)
        for chunk in (*path[:1], *contents):
            self._postpone_ttl_before(chunk, now)
        if not self._pending_touches:
            asyncio.get_running_loop().call_later(_TOUCH_AFTER_SECONDS, self._apply_some_touches)
        # Parents count as used after their children, so that they are evicted later.
        self._pending_touches.extend(reversed(path))
        self._pending_touches.extend(contents)

    def _postpone_ttl_before(self, chunk: Chunk, now: float) -> None:
        """Postpone the end of the tenant's TTL of a used chunk's ancestors: their expiry would remove the chunk."""
        if chunk.tenant.limits.ttl_seconds is None:
            return
        parent = self._tiers.parent_of(chunk)
        while parent is not None and parent.last_used_at < now:
            self._tiers.record_use([parent], now, is_hit=False)
            self._tiers.save_recency(parent)
            parent = self._tiers.parent_of(parent)

    def _apply_some_touches(self) -> None:
        self._apply_touches(_MAX_TOUCHES)
        if self._pending_touches:
            asyncio.get_running_loop().call_soon(self._apply_some_touches)

    def apply_all_touches(self) -> None:
        """Tell the eviction policies all pending uses."""
        self._apply_touches(len(self._pending_touches))

    def _apply_touches(self, limit: int) -> None:
        for _ in range(min(limit, len(self._pending_touches))):
            self._tiers.touch(self._pending_touches.popleft())


def _num_outside_window(found: Sequence[MatchedChunk], window: int) -> int:
    """Count leading chunks that end before the last ``window`` tokens of the prefix."""
    if not window:
        return 0
    ends = list(accumulate(n for _, n in found))
    whole = [end for end, (chunk, n) in zip(ends, found, strict=True) if n == chunk.tokens]
    return sum(end <= whole[-1] - window for end in ends) if whole else 0
