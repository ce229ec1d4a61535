"""What the pool has of a waiting prompt, and where its pages come from; who goes first is the scheduler's to say.

A request whose prompt another one is just reading is held back until that one has it, so that what they share is read
once. For one that is being loaded it waits only where the load is expected to be faster than computing, and no longer
than computing would take. Only the engine's thread uses this.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import structlog

from inference_svc.engine.kv_connector import KVConnector, ProbeCallback
from inference_svc.engine.sequence import Sequence, SequenceState, StoredPrefix
from inference_svc.kv_pool.block_table import BLOCK_TOKENS, BlockTable
from inference_svc.kv_pool.kv_pool import WINDOW_STEP, KVPool
from inference_svc.kv_pool.prefix_cache import MIN_SHARED_TOKENS, CachedSequence, PrefixCache, TokenArray, common_prefix
from inference_svc.scheduling import scheduler
from inference_svc.scheduling.pool_capacity import LOOKAHEAD_TOKENS, exceeds_pool
from inference_svc.scheduling.prefill_budget import PrefillBudget

log = structlog.get_logger("engine")

# Waiting requests that are compared with each other; the others wait their turn.
_WINDOW = 16
# Pages are taken ahead for a new sequence's answer, so that it stays in one piece, while a quarter of the pool is free.
_SPARE_TOKENS, _SPARE_SHARE = 256, 4
# Copied at once.
_COPIED_TOKENS = 1024


@dataclass(frozen=True)
class PrefixSource:
    """Where ``tokens`` leading tokens of a prompt lie in the pool: in a resident, or in a running sequence."""

    tokens: int = 0
    resident: CachedSequence | None = None
    running: Sequence | None = None


def as_array(tokens: list[int]) -> TokenArray:
    return np.asarray(tokens, np.uint32)


class Admission:
    """Chooses among waiting sequences and gives them pages. ``piece``: tokens of one that are computed at once;
    ``longest``: most tokens of one with its answer."""

    def __init__(
        self, pool: KVPool, residents: PrefixCache, piece: int, longest: int, pace: PrefillBudget, cache: KVConnector
    ) -> None:
        self._pool, self._residents, self._piece, self._longest = pool, residents, piece, longest
        self._pace, self._cache = pace, cache
        self.wake_at: float | None = None
        """When the first of those that ``next`` held back is held back no more (time.perf_counter)."""

    def next(self, waiting: deque[Sequence], live: Iterable[Sequence]) -> tuple[Sequence, PrefixSource] | None:
        """The sequence to admit now, with what the pool has of it; None when all are held back.

        ``live`` are the sequences with pages. A preempted sequence, at the queue's front, goes first. Who waits for
        the overflow stands in nobody's way.
        """
        now, live = time.perf_counter(), list(live)
        sequences = list(islice(self._in_turn(waiting), _WINDOW))
        found = [self._source(s, live, now) for s in sequences]
        self.wake_at = min((until for _, until in found if until > now), default=None)
        chosen = scheduler.select_waiting(
            [
                scheduler.Candidate(now - s.arrived, max(source.tokens, s.expected_cached), until > now, s.preempted)
                for s, (source, until) in zip(sequences, found, strict=True)
            ]
        )
        return None if chosen is None else (sequences[chosen], found[chosen][0])

    def probe(self, waiting: Iterable[Sequence], done: ProbeCallback) -> None:
        """Has the cache say, once of each, how much of waiting sequences is stored."""
        for sequence in waiting:
            if not sequence.probed:
                sequence.probed = True
                try:
                    self._cache.probe(sequence, done)
                except Exception:  # it only tells whom to admit first
                    log.exception("probing failed", request=sequence.id)

    def _source(self, sequence: Sequence, live: list[Sequence], now: float) -> tuple[PrefixSource, float]:
        """The best source for a prompt, and until when to wait for a live sequence that will soon be a better one."""
        if not sequence.cache.read:
            return PrefixSource(), 0.0
        # The last token is always computed: its logits are wanted.
        whole = as_array(sequence.tokens) if sequence.preempted else sequence.prompt_ids
        tokens, realm = whole[:-1], sequence.realm
        if len(tokens) < MIN_SHARED_TOKENS:
            return PrefixSource(), 0.0
        resident, longest = self._residents.best(realm, tokens)
        source, coming = PrefixSource(longest, resident=resident), list[tuple[Sequence, int]]()
        for other in live:
            if other.realm != realm or not other.cache.write:
                continue
            shared = common_prefix(tokens[:MIN_SHARED_TOKENS], other.prompt_ids)
            if shared < MIN_SHARED_TOKENS:
                continue
            shared = common_prefix(tokens, other.prompt_ids)
            loaded = other.gate is None or other.gate.complete
            ready, table = min(shared, other.reusable), other.table
            reached = table is not None and self._pool.reaches(table, ready)
            if loaded and reached and ready > source.tokens:
                source = PrefixSource(ready, running=other)
            if reached:
                coming.append((other, min(shared, other.prompt_tokens if other.plan is None else other.plan.exact)))
        better = [(other, tokens) for other, tokens in coming if tokens >= source.tokens + MIN_SHARED_TOKENS]
        return source, max((self._until(sequence, *one, source, now) for one in better), default=0.0)

    def _until(self, sequence: Sequence, other: Sequence, tokens: int, source: PrefixSource, now: float) -> float:
        """Until when a sequence waits for another one to have so many of its tokens."""
        latest = sequence.arrived + scheduler.MAX_HOLD_SECONDS
        computing = self._pace.seconds(tokens - source.tokens)
        if not (other.state is SequenceState.LOADING or other.gated) or computing is None:
            return latest
        expected = other.admitted_at + self._cache.load_seconds(other.missing)
        if expected > now + computing:
            return 0.0
        return min(latest, max(other.admitted_at, sequence.queued_at) + computing)

    def allocate(self, sequence: Sequence, source: PrefixSource, free_pages: int, leave: int) -> bool:
        """Gives a sequence its pages, the first ``sequence.computed`` tokens of them filled from the source. False,
        with nothing changed, when of ``free_pages``, those of residents included, it would not ``leave`` so many.
        Raises OverflowFailed; the sequence may have pages then."""
        if self._pool.overflow_pages and source.tokens and _left(source):
            source = PrefixSource()
        if self.exceeds_pool(sequence):
            return self._apart(sequence, source)
        needed = self._at_first(len(sequence.tokens) + 1, source)
        pages = -(-needed // BLOCK_TOKENS)
        crosses = source.tokens > 0 and _table(source).apart
        own = pages - (0 if crosses else _in_place(source) // BLOCK_TOKENS)
        if free_pages - own < leave:
            if source.resident is None or leave:
                return False
            # Nobody else would ever give pages back: rather without the source, whose own may be what is lacking.
            return self.allocate(sequence, PrefixSource(), free_pages, leave)
        plenty = self._pool.pages // _SPARE_SHARE
        ahead = min(sequence.max_tokens - sequence.generated, _SPARE_TOKENS)
        spare = ahead if free_pages - own - ahead // BLOCK_TOKENS >= max(leave, plenty) else 0
        if not crosses and self._adopt(sequence, source, needed + spare):
            return True
        if not self._pool.read_by_pages and self._copy(sequence, source, needed + spare):
            return True
        if source.tokens and not crosses and self._share(sequence, source, needed):
            return True
        table = self._pool.allocate(needed, spare)
        while table is None and self._residents.evict():
            table = self._pool.allocate(needed, spare)
        sequence.table = table
        if table is not None and crosses:
            self._bring(table, sequence, source)
        return table is not None

    # ---- the overflow ---------------------------------------------------------------------------------------

    def exceeds_pool(self, sequence: Sequence) -> bool:
        """Whether a sequence, with the next tokens of its answer, needs more than all of the pool, and the overflow
        therefore."""
        if not self._pool.overflow_pages:
            return False
        soon = min(sequence.max_tokens - sequence.generated, _SPARE_TOKENS)
        return exceeds_pool(self._pool, self._piece, min(len(sequence.tokens) + soon, self._longest))

    def _in_turn(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """Those that may be admitted by what the overflow has: who does not need it, and the first of those who do, if
        there is room for it."""
        served = False
        for sequence in waiting:
            if not self.exceeds_pool(sequence):
                yield sequence
            elif not served:
                served = True
                kept = sum(t.tokens for t in self._residents.tables if t.apart)
                if self._at_most(sequence) <= self._pool.free_overflow_pages * BLOCK_TOKENS + kept:
                    yield sequence

    def _at_most(self, sequence: Sequence) -> int:
        """How many tokens it has at its end."""
        return min(sequence.prompt_tokens + sequence.max_tokens, self._longest)

    def _apart(self, sequence: Sequence, source: PrefixSource) -> bool:
        """Gives a sequence all pages that it will ever need, in the overflow. False when too few are free."""
        wanted, resident = self._at_most(sequence), source.resident
        goes_on = resident is not None and resident.table.apart and sequence.cache.write
        if resident is not None and goes_on and source.tokens + BLOCK_TOKENS >= len(resident.tokens):
            sequence.table = table = self._residents.take(resident)
            while not self._pool.grow(table, wanted) and self._residents.evict(apart=True):
                pass
            if table.tokens < wanted:
                self._pool.free(table)
                sequence.table = None
                return False
            self._residents.back(table, source.tokens, len(sequence.tokens) + LOOKAHEAD_TOKENS)
            self._begin(sequence, source)
            return True
        if resident is not None:
            self._residents.touch(resident)  # it goes last
        found = self._pool.allocate_apart(wanted)
        while found is None and self._residents.evict(apart=True):
            found = self._pool.allocate_apart(wanted)
        if found is None:
            return False
        sequence.table = found  # from here on whoever fails frees it
        self._residents.back(found, 0, len(sequence.tokens) + LOOKAHEAD_TOKENS)
        if source.tokens and _table(source).ranges:  # it may have gone to make room
            self._bring(found, sequence, source)
        return True

    def _bring(self, table: BlockTable, sequence: Sequence, source: PrefixSource) -> None:
        """Copies what the source has into a sequence's pages, from the pool into its overflow or back."""
        for at in range(0, source.tokens, _COPIED_TOKENS):
            self._pool.copy(_table(source), table, at, min(at + _COPIED_TOKENS, source.tokens))
        if source.resident is not None:
            self._residents.touch(source.resident)
        self._begin(sequence, source)

    # ---- the pool -------------------------------------------------------------------------------------------

    def _at_first(self, tokens: int, source: PrefixSource) -> int:
        """For how many of so many tokens a sequence gets pages at first."""
        if not self._pool.moves:
            return tokens
        return min(tokens, source.tokens + self._pool.window + self._piece + WINDOW_STEP + BLOCK_TOKENS)

    def _adopt(self, sequence: Sequence, source: PrefixSource, wanted: int) -> bool:
        """Goes on in a resident's own pages, when the prompt continues it and there is room behind it. Not for a
        request that leaves nothing behind: the resident would be gone with it."""
        resident = source.resident
        if resident is None or not sequence.cache.write or source.tokens + BLOCK_TOKENS < len(resident.tokens):
            return False
        mine = self._pool.writable(resident.table, source.tokens)
        if not mine or not self._pool.grow_in_place(resident.table, wanted):
            return False
        sequence.table = self._residents.take(resident)
        self._begin(sequence, source)
        return True

    def _copy(self, sequence: Sequence, source: PrefixSource, wanted: int) -> bool:
        """Copies what is shared into pages in one piece, for attention that would have to gather pages."""
        if not source.tokens:
            return False
        left = _left(source)
        table = self._pool.allocate_contiguous(wanted - left)
        if table is None:
            return False
        sequence.table = table = table.spread(0, left) if left else table  # from here on whoever fails frees it
        table.since = _table(source).since
        self._pool.copy(_table(source), table, left, source.tokens)
        if source.resident is not None:
            self._residents.touch(source.resident)
        self._begin(sequence, source)
        return True

    def _share(self, sequence: Sequence, source: PrefixSource, needed: int) -> bool:
        """Refers to the source's whole pages and copies the begun one."""
        if source.resident is not None:
            self._residents.touch(source.resident)
        table = self._pool.share(_table(source), source.tokens)
        shared = table.tokens
        while not self._pool.grow(table, needed):
            # Evicting the source itself is fine too: its shared pages are held by the new table now.
            if not self._residents.evict():
                self._pool.free(table)
                return False
        source_table = _table(source)
        kept = bool(source_table.ranges)
        end = source.tokens if kept else shared
        if not self._pool.reaches(table, end):  # the begun page is gone, and so is what is seen from before it
            self._pool.free(table)
            return False
        sequence.table = table  # from here on whoever fails frees it
        self._pool.copy(source_table, table, shared, end)
        self._begin(sequence, PrefixSource(end, source.resident, source.running))
        return True

    def _begin(self, sequence: Sequence, source: PrefixSource) -> None:
        sequence.computed = source.tokens
        stored = source.resident.stored if source.resident else source.running.stored if source.running else None
        if stored is not None and stored.tokens <= source.tokens:
            sequence.stored = StoredPrefix(stored.tokens, stored.prefix_hash, min(stored.covered, source.tokens))


def _in_place(source: PrefixSource) -> int:
    """Of a source's tokens, those that need no pages of their own beside it."""
    return source.tokens if source.running is not None else _left(source)


def _left(source: PrefixSource) -> int:
    """Leading tokens of a source whose pages it does not hold."""
    return _table(source).left if source.tokens else 0


def _table(source: PrefixSource) -> BlockTable:
    table = source.resident.table if source.resident else source.running.table if source.running else None
    assert table is not None, "a source without pages"
    return table
