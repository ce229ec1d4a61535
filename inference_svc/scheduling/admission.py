"""Admission: finds a waiting prompt's prefix in the pool and allocates its blocks.

``waiting_order`` decides the order. If another request is computing the prefix of a waiting request, the waiting
request is held back until it can share the prefix, so that the prefix is computed once. If another request is loading
the prefix, the waiting request waits only if the load should be faster than computing, and no longer than computing
would take. Only the engine's thread uses this module.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from weakref import WeakKeyDictionary

import structlog

from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.kv_pool import WINDOW_STEP, KVPool
from inference_svc.kv_pool.prefix_cache import (
    MIN_SHARED_TOKENS,
    PrefixCache,
    WaitingPrompt,
    as_array,
)
from inference_svc.scheduling import waiting_order
from inference_svc.scheduling.context_limits import LOOKAHEAD_TOKENS, exceeds_pool
from inference_svc.scheduling.copy_on_write import CopyOnWrite, PrefixSource
from inference_svc.scheduling.prefill_budget import PrefillBudget
from inference_svc.sequence.kv_connector import KVConnector, ProbeCallback
from inference_svc.sequence.sequence import Sequence, SequenceState

log = structlog.get_logger("engine")

# Number of waiting requests, from the front of the queue, among which admission chooses. Those held back do not count,
# but no more than _MAX_EXAMINED are examined.
_WINDOW, _MAX_EXAMINED = 16, 128
# A new sequence gets up to _SPARE_TOKENS additional slots, so that its blocks stay contiguous while its answer grows.
# It gets them only if 1 / _SPARE_SHARE of the pool stays free.
_SPARE_TOKENS, _SPARE_SHARE = 256, 4


@dataclass(frozen=True)
class _Prospect:
    """Prefix in the pool that a sequence would start from.

    Until the time ``until`` (0: none), the sequence is held back, because another one is computing or loading
    ``awaited`` tokens of its prompt.
    """

    source: PrefixSource
    until: float = 0.0
    awaited: int = 0


class Admission:
    """Chooses among waiting sequences and allocates their blocks.

    ``piece``: maximum prompt tokens per step. ``max_tokens``: limit of prompt and answer together.
    """

    def __init__(
        self,
        pool: KVPool,
        prefix_cache: PrefixCache,
        piece: int,
        max_tokens: int,
        budget: PrefillBudget,
        cache: KVConnector,
    ) -> None:
        self._pool, self._prefix_cache, self._piece, self._longest = pool, prefix_cache, piece, max_tokens
        self._budget, self._cache = budget, cache
        self._blocks, self._prompts = CopyOnWrite(pool, prefix_cache), WeakKeyDictionary[Sequence, WaitingPrompt]()
        self.wake_at: float | None = None
        """Time at which the first held-back sequence may be admitted (time.perf_counter)."""

    def next(self, waiting: deque[Sequence], live: Iterable[Sequence]) -> tuple[Sequence, PrefixSource] | None:
        """Chooses the sequence to admit now, with its prefix in the pool; None if no sequence can be admitted.

        ``live`` are the sequences with blocks. A preempted sequence is at the front of the queue and is admitted first.
        A sequence that waits for overflow blocks does not delay the other sequences.
        """
        now, live = time.perf_counter(), list(live)
        sequences, prospects = list[Sequence](), list[_Prospect]()
        held = list[tuple[Sequence, int]]()  # with the lengths of the prefixes that they wait for
        for s in islice(self._in_turn(waiting), _MAX_EXAMINED):
            if not s.queue.preempted and any(self._awaits(s, *one) for one in held):
                continue
            prospect = self._prospect(s, live, now)
            sequences.append(s)
            prospects.append(prospect)
            if prospect.until > now:
                held.append((s, min(prospect.awaited, s.request.num_prompt_tokens)))
            elif len(sequences) - len(held) == _WINDOW:
                break
        self.wake_at = min((p.until for p in prospects if p.until > now), default=None)
        chosen = waiting_order.select_waiting(
            [
                waiting_order.Candidate(
                    now - s.request.arrived_at,
                    max(p.source.tokens, s.queue.num_matched),
                    p.until > now,
                    s.queue.preempted,
                )
                for s, p in zip(sequences, prospects, strict=True)
            ]
        )
        return None if chosen is None else (sequences[chosen], prospects[chosen].source)

    def probe(self, waiting: Iterable[Sequence], done: ProbeCallback) -> None:
        """Asks the connector, once per waiting sequence, for the length of the stored prefix."""
        for sequence in waiting:
            if not sequence.queue.probed:
                sequence.queue.probed = True
                try:
                    self._cache.probe(sequence, done)
                except Exception:  # without a probe, only the order of admission may differ
                    log.exception("probing failed", request=sequence.request.id)

    def _prompt(self, sequence: Sequence) -> WaitingPrompt:
        """Returns a waiting sequence's tokens, until it ends or waits again with more tokens after a preemption."""
        found = self._prompts.get(sequence)
        if found is None or len(found.tokens) != len(sequence.tokens):
            tokens = as_array(sequence.tokens) if sequence.queue.preempted else sequence.prompt_ids
            found = self._prompts[sequence] = WaitingPrompt(tokens)
        return found

    def _awaits(self, sequence: Sequence, held: Sequence, awaited: int) -> bool:
        """True if a sequence begins with the ``awaited`` tokens for which another one is held back."""
        if not sequence.reads_cache or sequence.cache_scope != held.cache_scope:
            return False
        return self._prompt(sequence).shared_with(held, held.prompt_ids) >= awaited

    def _prospect(self, sequence: Sequence, live: list[Sequence], now: float) -> _Prospect:
        """Finds the longest prefix in the pool, and whether a live sequence is computing or loading a longer one."""
        if not sequence.reads_cache:
            return _Prospect(PrefixSource())
        # The last token is always computed: sampling needs its logits.
        prompt, scope, most = self._prompt(sequence), sequence.cache_scope, len(sequence.tokens) - 1
        if most < MIN_SHARED_TOKENS:
            return _Prospect(PrefixSource())
        cached, longest = self._prefix_cache.longest_prefix(scope, prompt)
        source, coming = PrefixSource(longest, cached=cached), list[tuple[Sequence, int]]()
        for other in live:
            if other.cache_scope != scope or not other.request.cache.write:
                continue
            shared = min(prompt.shared_with(other, other.prompt_ids), most)
            if shared < MIN_SHARED_TOKENS:
                continue
            loaded = other.kv.layers is None or other.kv.layers.complete
            ready, table = min(shared, other.kv.num_exact), other.kv.table
            reached = table is not None and self._pool.covers_window(table, ready)
            # Blocks of a running sequence are in use anyway, those of a cached one could be freed.
            equal = 0 < ready == source.tokens and table is not None and not (table.in_overflow or table.num_released)
            if loaded and reached and (equal or ready > source.tokens):
                source = PrefixSource(ready, running=other)
            if reached:
                coming.append(
                    (
                        other,
                        min(shared, other.request.num_prompt_tokens if other.kv.plan is None else other.kv.plan.exact),
                    )
                )
        better = [(other, tokens) for other, tokens in coming if tokens >= source.tokens + MIN_SHARED_TOKENS]
        until, awaited = max(((self._until(sequence, *one, source, now), one[1]) for one in better), default=(0.0, 0))
        return _Prospect(source, until, awaited)

    def _until(self, sequence: Sequence, other: Sequence, tokens: int, source: PrefixSource, now: float) -> float:
        """Time until which ``sequence`` waits for ``other`` to have ``tokens`` tokens of their common prefix."""
        latest = sequence.request.arrived_at + waiting_order.MAX_HOLD_SECONDS
        computing = self._budget.seconds(tokens - source.tokens)
        if not (other.state is SequenceState.LOADING or other.kv.is_loading) or computing is None:
            return latest
        expected = other.timestamps.admitted_at + self._cache.load_seconds(other.num_uncomputed)
        if expected > now + computing:
            return 0.0
        return min(latest, max(other.timestamps.admitted_at, sequence.timestamps.queued_at) + computing)

    def allocate(self, sequence: Sequence, source: PrefixSource, free_pages: int, leave: int) -> bool:
        """Allocates blocks for a sequence, and fills its first ``kv.num_computed`` tokens from the source.

        ``free_pages`` counts free and evictable blocks. If fewer than ``leave`` of them would remain, it changes
        nothing and returns False. Raises OverflowFailed; the sequence may then have blocks.
        """
        if self._pool.overflow_pages and source.tokens and source.num_released:
            source = PrefixSource()
        if self.exceeds_pool(sequence):
            return self._allocate_overflow(sequence, source)
        needed = self._initial_tokens(len(sequence.tokens) + 1, source)
        pages = -(-needed // PAGE_TOKENS)
        crosses = source.tokens > 0 and source.table.in_overflow
        own = pages - (0 if crosses else source.num_in_place // PAGE_TOKENS)
        if free_pages - own < leave:
            if source.cached is None or leave:
                return False
            # No running sequence will free blocks. Admit without the source, so that its blocks may be evicted.
            return self.allocate(sequence, PrefixSource(), free_pages, leave)
        plenty = self._pool.pages // _SPARE_SHARE
        ahead = min(sequence.request.max_tokens - sequence.num_generated, _SPARE_TOKENS)
        spare = ahead if free_pages - own - ahead // PAGE_TOKENS >= max(leave, plenty) else 0
        if not crosses and self._blocks.adopt(sequence, source, needed + spare):
            return True
        if not crosses and self._blocks.share_range(sequence, source, needed + spare):
            return True
        if not self._pool.attends_by_pages and self._blocks.copy(sequence, source, needed + spare):
            return True
        if source.tokens and not crosses and self._blocks.share(sequence, source, needed):
            return True
        table = self._prefix_cache.allocate(needed, spare)
        if table is None:
            return False
        sequence.kv.attach(table)
        if crosses:
            self._blocks.copy_across(table, sequence, source)
        return True

    def _initial_tokens(self, tokens: int, source: PrefixSource) -> int:
        """Number of tokens that get blocks at admission; not all, if blocks behind the window are freed."""
        if not self._pool.reclaims_window:
            return tokens
        return min(tokens, source.tokens + self._pool.window + self._piece + WINDOW_STEP + PAGE_TOKENS)

    # ---- the overflow ---------------------------------------------------------------------------------------

    def exceeds_pool(self, sequence: Sequence) -> bool:
        """True if a sequence needs the overflow: with its next tokens, it exceeds the whole pool."""
        if not self._pool.overflow_pages:
            return False
        soon = min(sequence.request.max_tokens - sequence.num_generated, _SPARE_TOKENS)
        return exceeds_pool(self._pool, self._piece, min(len(sequence.tokens) + soon, self._longest))

    def _in_turn(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yields the sequences that may be admitted now.

        All sequences that fit the pool may be admitted. Of the sequences that need the overflow, only the first may be
        admitted, and only if the overflow has enough blocks for it.
        """
        served = False
        for sequence in waiting:
            if not self.exceeds_pool(sequence):
                yield sequence
            elif not served:
                served = True
                if self._max_tokens_of(sequence) <= self._prefix_cache.available_overflow_tokens:
                    yield sequence

    def _max_tokens_of(self, sequence: Sequence) -> int:
        """Largest number of tokens that a sequence may reach."""
        return min(sequence.request.num_prompt_tokens + sequence.request.max_tokens, self._longest)

    def _allocate_overflow(self, sequence: Sequence, source: PrefixSource) -> bool:
        """Allocates all blocks that a sequence may ever need, in the overflow. False if too few are free."""
        wanted, cached = self._max_tokens_of(sequence), source.cached
        goes_on = cached is not None and cached.table.in_overflow and sequence.request.cache.write
        if cached is not None and goes_on and source.tokens + PAGE_TOKENS >= len(cached.tokens):
            table = self._prefix_cache.take(cached)
            sequence.kv.attach(table)
            while not self._pool.grow(table, wanted) and self._prefix_cache.evict(in_overflow=True):
                pass
            if table.tokens < wanted:
                self._pool.free(table)
                sequence.kv.detach()
                return False
            self._prefix_cache.reserve_overflow(table, source.tokens, len(sequence.tokens) + LOOKAHEAD_TOKENS)
            self._blocks.begin(sequence, source)
            return True
        if cached is not None:
            self._prefix_cache.touch(cached)  # so that eviction reaches the source last
        found = self._prefix_cache.allocate_overflow(wanted)
        if found is None:
            return False
        sequence.kv.attach(found)
        self._prefix_cache.reserve_overflow(found, 0, len(sequence.tokens) + LOOKAHEAD_TOKENS)
        if source.tokens and source.table.ranges:  # no ranges: the allocation evicted the source
            self._blocks.copy_across(found, sequence, source)
        return True
