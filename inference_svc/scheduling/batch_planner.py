"""The next forward: whose tokens are computed, in pages that are made room in for them.

Who gets rows and pages is decided by ``scheduler``, which knows numbers; here these become spans. Only the engine's
thread uses this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from kvsidecar.errors import OverflowFailed

from inference_svc.engine.sequence import Sequence
from inference_svc.kv_pool.block_table import BLOCK_TOKENS, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import PrefixCache
from inference_svc.kv_pool.window_release import WindowReleaser
from inference_svc.model_runner.forward_batch import SequenceSlice
from inference_svc.sampling.prompt_logprobs import row_budget, rows_to_score
from inference_svc.scheduling import scheduler
from inference_svc.scheduling.pool_capacity import LOOKAHEAD_TOKENS
from inference_svc.scheduling.preemption import PreemptionSaver
from inference_svc.scheduling.prefill_budget import PrefillBudget
from inference_svc.scheduling.scheduler_entry import work_of
from inference_svc.spec_decode.branch_tables import BranchTables
from inference_svc.spec_decode.proposer import Draft
from inference_svc.spec_decode.speculator import Speculator


class BatchPlanner:
    """Makes the spans of each forward, ``batch_tokens`` tokens at most beside guesses, and of prompts no more than
    ``pace`` allows while others decode."""

    def __init__(
        self,
        pool: KVPool,
        residents: PrefixCache,
        passing: WindowReleaser,
        leaving: PreemptionSaver,
        speculator: Speculator,
        batch_tokens: int,
        longest: int,
        pace: PrefillBudget,
        count_free: Callable[[], int],
        preempt: Callable[[Sequence], None],
        fail: Callable[[Sequence, Exception], None],
    ) -> None:
        """``count_free`` counts the pages that are free, or only kept for reuse; ``preempt`` takes a sequence out of
        the batch, its pages with it, ``fail`` for good."""
        self._pool, self._residents, self._passing, self._leaving = pool, residents, passing, leaving
        self._speculator, self._batch_tokens, self._longest = speculator, batch_tokens, longest
        self._pace, self._count_free, self._preempt, self._fail = pace, count_free, preempt, fail
        # What branches of the last plan hold, until it is computed.
        self.forks = BranchTables(pool, self._grow)

    def plan(self, able: list[Sequence]) -> list[tuple[Sequence, SequenceSlice]]:
        """The spans of the next forward over sequences with pages, and room for their keys and values. May preempt
        some of them."""
        due = min(sum(s.missing for s in able), self._batch_tokens)
        guessed = self._speculator.prepare([s for s in able if s.missing == 1 and not s.gated], due, self._longest)
        scoring = row_budget(able)
        able = [s for s in able if scoring.get(s, 1)]
        step = self._decide(able, guessed, scoring)
        if self._pool.window and (step.preempted or not (step.rows or self._coming)):
            self._passing.make_room(able)  # what waits to be stored is worth less than what others have computed
            step = self._decide(able, guessed, scoring)
        for i in step.preempted:
            self._preempt(able[i])
        spans, verified, trees = list[tuple[Sequence, SequenceSlice]](), dict(step.guesses), dict[int, Draft]()
        for sequence in able:
            sequence.passed_over += 1
        for i, count in step.rows:
            sequence = able[i]
            assert sequence.table is not None
            end, scored = sequence.computed + count, rows_to_score(sequence, count)
            if not self._grow(sequence.table, end):  # others are still being stored, or fewer pages than were counted
                if not (self._leaving.sequences or self._passing.busy):
                    self._preempt(sequence)
                continue
            try:
                self._residents.back(sequence.table, sequence.computed, end + LOOKAHEAD_TOKENS)
            except OverflowFailed as error:
                self._fail(sequence, error)
                continue
            sequence.passed_over = 0
            at, piece, last = sequence.computed, sequence.tokens[sequence.computed : end], end == len(sequence.tokens)
            span = SequenceSlice(
                piece, at, sequence.table, last, gate=sequence.gate, adapter=sequence.adapter, scored=scored
            )
            guesses = guessed.get(sequence, Draft())
            guesses = guesses.chosen(range(verified.get(i, 0)))
            if guesses and self._grow(sequence.table, end + guesses.depth):
                first, *others = guesses.paths()
                span = replace(span, tokens=piece + [guesses.tokens[at] for at in first], drafted=len(first))
                if others:
                    trees[len(spans)] = guesses
            spans.append((sequence, span))
        self._fork(spans, trees)
        spans.sort(key=lambda one: one[0].realm.adapter)  # an adapter's rows are one piece then
        return spans

    def _fork(self, spans: list[tuple[Sequence, SequenceSlice]], trees: dict[int, Draft]) -> None:
        """Adds the branches of what is guessed behind some spans, in pages that are left when everybody has theirs."""
        began, branches = time.perf_counter(), 0
        for i, guesses in trees.items():
            sequence, span = spans[i]
            found = self.forks.branches(sequence, guesses)
            spans[i], branches = (sequence, replace(span, branches=found)), branches + len(found)
        self._speculator.forked(branches, time.perf_counter() - began)

    @property
    def _coming(self) -> int:
        """Pages that are free as soon as what they hold is stored."""
        return self._leaving.pages + self._passing.pages

    def _decide(
        self, able: list[Sequence], guessed: dict[Sequence, Draft], scoring: dict[Sequence, int]
    ) -> scheduler.StepPlan:
        works = [work_of(s, self._pool, len(guessed.get(s, ())), scoring.get(s)) for s in able]
        free, most = self._count_free(), self._pace.max_rows
        return scheduler.plan_step(works, self._batch_tokens, free, BLOCK_TOKENS, self._coming, most)

    def _grow(self, table: BlockTable, tokens: int) -> bool:
        """Makes room for so many tokens in all, if need be where residents were. False when there is none."""
        while not self._pool.grow(table, tokens):
            if table.apart or not self._residents.evict():  # who is apart has had all that it needs from the start
                return False
        return True
