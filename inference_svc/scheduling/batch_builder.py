"""Batch builder: builds the next batch, and grows block tables for it.

``scheduler`` decides from numbers which sequences get rows and blocks, and which are preempted. The batch builder turns
the decision into slices. If blocks are missing, it evicts cached prefixes. It only returns preemptions and failures;
the engine core carries them out after ``decide`` and after ``build``. Only the engine's thread uses this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvsidecar.errors import OverflowFailed

from inference_svc.kv_pool.block_table import PAGE_TOKENS, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import PrefixCache
from inference_svc.model_runner.forward_batch import SequenceSlice
from inference_svc.scheduling import scheduler
from inference_svc.scheduling.context_limits import LOOKAHEAD_TOKENS
from inference_svc.scheduling.preempted_kv_saver import PreemptedKVSaver
from inference_svc.scheduling.prefill_budget import PrefillBudget
from inference_svc.scheduling.window_release import WindowReleaser
from inference_svc.sequence.prompt_logprobs import row_budget, rows_to_score
from inference_svc.sequence.sequence import Sequence
from inference_svc.spec_decode.branch_tables import BranchTables
from inference_svc.spec_decode.proposer import Draft
from inference_svc.spec_decode.speculator import Speculator


@dataclass(frozen=True)
class BatchServices:
    """Parts of the engine that the batch builder uses, and batch limits."""

    pool: KVPool
    prefix_cache: PrefixCache
    window_releaser: WindowReleaser
    preempted_kv_saver: PreemptedKVSaver
    prefill_budget: PrefillBudget
    speculator: Speculator
    max_batch_tokens: int  # maximum rows of a step, not counting draft tokens
    max_sequence_tokens: int


@dataclass(frozen=True)
class Decision:
    """Rows of the next step. The caller removes ``preempted`` sequences before ``BatchBuilder.build``."""

    sequences: list[Sequence]
    step: scheduler.StepPlan
    drafts: dict[Sequence, Draft]

    @property
    def preempted(self) -> list[Sequence]:
        """Sequences to preempt, because other sequences need their blocks."""
        return [self.sequences[i] for i in self.step.preempted]


@dataclass
class BuiltBatch:
    """Slices of the next step.

    ``preempted`` and ``failed`` sequences did not get the blocks that the decision planned for them.
    """

    slices: list[tuple[Sequence, SequenceSlice]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, OverflowFailed]] = field(default_factory=list)


class BatchBuilder:
    """Builds the slices of each step. Owns the branch tables of the step's draft trees."""

    def __init__(self, services: BatchServices, count_free_pages: Callable[[], int]) -> None:
        """``count_free_pages`` counts the blocks that are free, or referenced only by the prefix cache."""
        self._services, self._pool, self._count_free_pages = services, services.pool, count_free_pages
        self.branch_tables = BranchTables(services.pool, self._grow)

    def decide(self, sequences: list[Sequence]) -> Decision:
        """Chooses rows, draft tokens and preemptions for a step over sequences with blocks."""
        services, missing = self._services, [s.num_uncomputed for s in sequences]
        rows = min(sum(missing), services.max_batch_tokens)
        decoding = [s for s, count in zip(sequences, missing, strict=True) if count == 1 and not s.kv.is_loading]
        drafts = services.speculator.prepare(decoding, rows, services.max_sequence_tokens)
        max_rows = row_budget(sequences)
        if len(decoding) == len(sequences) == rows and not (drafts or max_rows) and self._has_pages(sequences):
            return Decision(sequences, scheduler.plan_decode_step(rows), drafts)
        sequences = [s for s in sequences if max_rows.get(s, 1)]
        step = self._schedule(sequences, drafts, max_rows)
        if self._pool.window and (step.preempted or not (step.rows or self._pending_pages)):
            # Freeing blocks that wait for a save costs less than preempting a sequence.
            services.window_releaser.release_unsaved(sequences)
            step = self._schedule(sequences, drafts, max_rows)
        return Decision(sequences, step, drafts)

    def build(self, decision: Decision) -> BuiltBatch:
        """Grows the block tables for a decision and returns its slices."""
        services, batch = self._services, BuiltBatch()
        verified, trees = dict(decision.step.draft_rows), dict[int, Draft]()
        for sequence in decision.sequences:
            sequence.queue.steps_skipped += 1
        for i, count in decision.step.rows:
            sequence = decision.sequences[i]
            kv = sequence.kv
            assert kv.table is not None
            end, to_score = kv.num_computed + count, rows_to_score(sequence, count)
            if not self._grow(kv.table, end):
                # Fewer blocks are free than were counted. If saves will soon free blocks, the sequence skips a step.
                if not (services.preempted_kv_saver.sequences or services.window_releaser.busy or batch.preempted):
                    batch.preempted.append(sequence)
                continue
            try:
                services.prefix_cache.reserve_overflow(kv.table, kv.num_computed, end + LOOKAHEAD_TOKENS)
            except OverflowFailed as error:
                batch.failed.append((sequence, error))
                continue
            sequence.queue.steps_skipped = 0
            tokens = sequence.tokens[kv.num_computed : end]
            piece = SequenceSlice(
                tokens,
                kv.num_computed,
                kv.table,
                end == len(sequence.tokens),
                gate=kv.layers,
                adapter=sequence.request.adapter,
                num_scored=to_score,
            )
            draft = decision.drafts[sequence].select(range(verified[i])) if i in verified else None
            if draft and self._grow(kv.table, end + draft.depth):
                first, *others = draft.paths()
                piece = replace(piece, tokens=tokens + [draft.tokens[at] for at in first], num_drafted=len(first))
                if others:
                    trees[len(batch.slices)] = draft
            batch.slices.append((sequence, piece))
        self._add_branches(batch.slices, trees)
        batch.slices.sort(key=lambda one: one[0].cache_scope.adapter)  # rows of one adapter are contiguous
        if self._pool.merges_ranges:
            _sort_by_prefix(batch.slices)
        return batch

    def _add_branches(self, slices: list[tuple[Sequence, SequenceSlice]], trees: dict[int, Draft]) -> None:
        """Adds branches of draft trees, in the blocks that remain after all slices have got their blocks."""
        began, count = time.perf_counter(), 0
        for i, draft in trees.items():
            sequence, piece = slices[i]
            branches = self.branch_tables.fork(sequence, draft)
            slices[i], count = (sequence, replace(piece, branches=branches)), count + len(branches)
        self._services.speculator.record_branching(count, time.perf_counter() - began)

    @property
    def _pending_pages(self) -> int:
        """Number of blocks that will be free after the pending saves."""
        return self._services.preempted_kv_saver.pending_pages + self._services.window_releaser.pending_pages

    def _has_pages(self, sequences: list[Sequence]) -> bool:
        """True if the free blocks suffice for a token of each sequence."""
        free_pages = self._pool.free_pages
        return len(sequences) <= free_pages or sum(s.kv.is_full for s in sequences) <= free_pages

    def _schedule(
        self, sequences: list[Sequence], drafts: dict[Sequence, Draft], max_rows: dict[Sequence, int]
    ) -> scheduler.StepPlan:
        entries = [make_entry(s, len(drafts.get(s, ())), max_rows.get(s)) for s in sequences]
        free_pages = self._pool.free_pages
        if scheduler.most_pages(entries, PAGE_TOKENS) > free_pages:
            # Only now evictable blocks matter, and only now sequences may be preempted.
            free_pages = self._count_free_pages()
            for entry, sequence in zip(entries, sequences, strict=True):
                assert sequence.kv.table is not None
                entry.exclusive_pages = self._pool.count_exclusive_pages(sequence.kv.table)
        return scheduler.plan_step(
            entries,
            self._services.max_batch_tokens,
            free_pages,
            PAGE_TOKENS,
            self._pending_pages,
            self._services.prefill_budget.max_rows,
        )

    def _grow(self, table: BlockTable, tokens: int) -> bool:
        """Grows a table to ``tokens`` tokens, evicting cached prefixes if needed. False if no block is left."""
        while not self._pool.grow(table, tokens):
            # Admission allocates all blocks of a table in the overflow, so this table cannot grow.
            if table.in_overflow or not self._services.prefix_cache.evict():
                return False
        return True


def make_entry(sequence: Sequence, num_draft_tokens: int, max_tokens: int | None = None) -> scheduler.SchedulerEntry:
    """Describes a sequence with blocks in numbers, without its exclusive blocks, for the scheduler."""
    kv, missing = sequence.kv, sequence.num_uncomputed
    assert kv.table is not None
    return scheduler.SchedulerEntry(
        arrived_at=sequence.request.arrived_at,
        num_uncomputed=missing if max_tokens is None else min(missing, max_tokens),
        free_slots=kv.table.tokens - kv.num_computed,
        exclusive_pages=0,
        steps_skipped=sequence.queue.steps_skipped,
        is_loading=kv.is_loading,
        num_draft_tokens=num_draft_tokens,
        in_overflow=kv.table.in_overflow,
    )


def _sort_by_prefix(slices: list[tuple[Sequence, SequenceSlice]]) -> None:
    """Makes slices of one adapter with the same prefix neighbours, because attention reads a prefix once for these.

    Sequences without a prefix come last, except those that are the beginning of others.
    """
    shared = {piece.table.ranges[0][0] for _, piece in slices if len(piece.table.ranges) > 1}

    def order(one: tuple[Sequence, SequenceSlice]) -> tuple[bytes, bool, tuple[int, int]]:
        first = one[1].table.ranges[0]
        return one[0].cache_scope.adapter, first[0] not in shared, first

    if shared:
        slices.sort(key=order)
