"""What the pool has of a waiting prompt, and where its pages come from; who goes first is the scheduler's to say.

A request whose prompt another one is just reading or loading is held back until that one has it, so that what they
share is read once. Only the engine's thread uses this.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from inference_svc.engine import scheduler
from inference_svc.engine.pool import PAGE_TOKENS, BlockTable, KVPool
from inference_svc.engine.residents import LEAST_SHARED, Resident, Residents, Tokens, common_prefix
from inference_svc.engine.sequence import Sequence, StoredPrefix

# Waiting requests that are compared with each other; the others wait their turn.
_WINDOW = 16
# Pages are taken ahead for a new sequence's answer, so that it stays in one piece, while a quarter of the pool is free.
_SPARE_TOKENS, _SPARE_SHARE = 256, 4


@dataclass(frozen=True)
class Source:
    """Where ``tokens`` leading tokens of a prompt lie in the pool: in a resident, or in a running sequence."""

    tokens: int = 0
    resident: Resident | None = None
    running: Sequence | None = None


def as_array(tokens: list[int]) -> Tokens:
    return np.asarray(tokens, np.uint32)


class Admission:
    """Chooses among waiting sequences and gives them pages."""

    def __init__(self, pool: KVPool, residents: Residents) -> None:
        self._pool, self._residents = pool, residents

    def next(self, waiting: deque[Sequence], live: Iterable[Sequence]) -> tuple[Sequence, Source] | None:
        """The sequence to admit now, with what the pool has of it; None when all are held back.

        ``live`` are the sequences with pages. A preempted sequence, at the queue's front, goes first.
        """
        now, live = time.perf_counter(), list(live)
        sequences = list(waiting)[:_WINDOW]
        found = [self._source(s, live) for s in sequences]
        chosen = scheduler.choose(
            [
                scheduler.Candidate(now - s.arrived, max(source.tokens, s.expected_cached), held_back, s.preempted)
                for s, (source, held_back) in zip(sequences, found, strict=True)
            ]
        )
        return None if chosen is None else (sequences[chosen], found[chosen][0])

    def _source(self, sequence: Sequence, live: list[Sequence]) -> tuple[Source, bool]:
        """The best source for a prompt, and whether a live sequence will soon be a better one."""
        if not sequence.cache.read:
            return Source(), False
        # The last token is always computed: its logits are wanted.
        whole = as_array(sequence.tokens) if sequence.preempted else sequence.prompt_ids
        tokens, realm = whole[:-1], sequence.realm
        if len(tokens) < LEAST_SHARED:
            return Source(), False
        resident, longest = self._residents.best(realm, tokens)
        source, coming = Source(longest, resident=resident), 0
        for other in live:
            if other.realm != realm or not other.cache.write:
                continue
            shared = common_prefix(tokens[:LEAST_SHARED], other.prompt_ids)
            if shared < LEAST_SHARED:
                continue
            shared = common_prefix(tokens, other.prompt_ids)
            loaded = other.gate is None or other.gate.complete
            if loaded and min(shared, other.reusable) > source.tokens:
                source = Source(min(shared, other.reusable), running=other)
            coming = max(coming, min(shared, other.prompt_tokens if other.plan is None else other.plan.exact))
        return source, coming >= source.tokens + LEAST_SHARED

    def allocate(self, sequence: Sequence, source: Source, free_pages: int, leave: int) -> bool:
        """Gives a sequence its pages, the first ``sequence.computed`` tokens of them filled from the source. False,
        with nothing changed, when of ``free_pages``, those of residents included, it would not ``leave`` so many."""
        needed, pages = len(sequence.tokens) + 1, -(-(len(sequence.tokens) + 1) // PAGE_TOKENS)
        own = pages - (source.tokens // PAGE_TOKENS if source.running is not None else 0)
        if free_pages - own < leave:
            return False
        plenty = self._pool.pages // _SPARE_SHARE
        ahead = min(sequence.max_tokens - sequence.generated, _SPARE_TOKENS)
        spare = ahead if free_pages - own - ahead // PAGE_TOKENS >= max(leave, plenty) else 0
        if self._adopt(sequence, source, needed + spare):
            return True
        if not self._pool.read_by_pages and self._copy(sequence, source, needed + spare):
            return True
        if source.tokens and self._share(sequence, source, needed):
            return True
        table = self._pool.allocate(needed, spare)
        while table is None and self._residents.evict():
            table = self._pool.allocate(needed, spare)
        sequence.table = table
        return table is not None

    def _adopt(self, sequence: Sequence, source: Source, wanted: int) -> bool:
        """Goes on in a resident's own pages, when the prompt continues it and there is room behind it. Not for a
        request that leaves nothing behind: the resident would be gone with it."""
        resident = source.resident
        if resident is None or not sequence.cache.write or source.tokens + PAGE_TOKENS < len(resident.tokens):
            return False
        mine = self._pool.writable(resident.table, source.tokens)
        if not mine or not self._pool.grow_in_place(resident.table, wanted):
            return False
        sequence.table = self._residents.take(resident)
        self._begin(sequence, source)
        return True

    def _copy(self, sequence: Sequence, source: Source, wanted: int) -> bool:
        """Copies what is shared into pages in one piece, for attention that would have to gather pages."""
        if not source.tokens:
            return False
        table = self._pool.allocate_contiguous(wanted)
        if table is None:
            return False
        sequence.table = table  # from here on whoever fails frees it
        self._pool.copy(_table(source), table, 0, source.tokens)
        if source.resident is not None:
            self._residents.touch(source.resident)
        self._begin(sequence, source)
        return True

    def _share(self, sequence: Sequence, source: Source, needed: int) -> bool:
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
        sequence.table = table  # from here on whoever fails frees it
        self._pool.copy(source_table, table, shared, end)
        self._begin(sequence, Source(end, source.resident, source.running))
        return True

    def _begin(self, sequence: Sequence, source: Source) -> None:
        sequence.computed = source.tokens
        stored = source.resident.stored if source.resident else source.running.stored if source.running else None
        if stored is not None and stored.tokens <= source.tokens:
            sequence.stored = StoredPrefix(stored.tokens, stored.prefix_hash, min(stored.covered, source.tokens))


def _table(source: Source) -> BlockTable:
    table = source.resident.table if source.resident else source.running.table if source.running else None
    assert table is not None, "a source without pages"
    return table
