"""Engine core: one step of the engine, and the state of its sequences.

A step admits waiting sequences, plans a batch, computes it and samples. An error of one sequence ends only that
sequence: if a batch of several sequences raises, each sequence is computed alone. Only sequences that raise again fail.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch
from kvsidecar.errors import KVSidecarError

from inference_svc.engine.corrupt_hits import CorruptHits
from inference_svc.engine.engine_events import (
    CancelRequested,
    EngineEvent,
    EngineTask,
    LoadFinished,
    PartialSaveFinished,
    PreemptionSaved,
    ProbeFinished,
    RequestSubmitted,
    SaveFinished,
)
from inference_svc.engine.engine_stats import EngineLimits, EngineStats
from inference_svc.engine.request_lifecycle import RequestFinisher, apply_load_result
from inference_svc.engine.speculative_sampler import SpeculativeSampler
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import PrefixCache
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.cuda_graphs import CudaGraphs
from inference_svc.model_runner.decoder import Decoder
from inference_svc.model_runner.engine_lost import check_device
from inference_svc.model_runner.layerwise_load import LayerLoadFailed
from inference_svc.sampling.sampler import LogitsNotFinite
from inference_svc.scheduling import scheduler
from inference_svc.scheduling.admission import Admission
from inference_svc.scheduling.batch_builder import BatchBuilder, BatchServices
from inference_svc.scheduling.preempted_kv_saver import PreemptedKVSaver
from inference_svc.scheduling.prefill_budget import PrefillBudget
from inference_svc.scheduling.recompute_queue import RecomputeQueue
from inference_svc.scheduling.window_release import WindowReleaser
from inference_svc.sequence.kv_connector import KVConnector, LoadCallback, LoadResult, ProbeCallback, SaveCallback
from inference_svc.sequence.prompt_logprobs import collect
from inference_svc.sequence.sequence import Sequence, SequenceState
from inference_svc.spec_decode.speculator import Speculator

log = structlog.get_logger("engine")


@dataclass(frozen=True)
class EngineServices:
    """Parts that the engine core uses."""

    decoder: Decoder
    pool: KVPool
    connector: KVConnector
    graphs: CudaGraphs | None
    speculator: Speculator
    stats: EngineStats


class EngineCore:
    """All sequences of an engine, and its step. Runs on the engine's thread; the connector's threads call ``post``."""

    def __init__(
        self,
        services: EngineServices,
        limits: EngineLimits,
        max_sequence_tokens: int,
        post: Callable[[EngineEvent], object],
    ) -> None:
        """``max_sequence_tokens`` limits prompt and answer together."""
        pool, connector, stats = services.pool, services.connector, services.stats
        self.pool, self.prefix_cache = pool, PrefixCache(pool, limits.prefix_cache_sequences)
        self.waiting: deque[Sequence] = deque()
        self.loading: set[Sequence] = set()
        self.running: list[Sequence] = []
        self.saving: set[Sequence] = set()
        self._decoder, self._connector, self._limits = services.decoder, connector, limits
        self._graphs, self._speculator, self._stats = services.graphs, services.speculator, stats
        self._on_loaded: LoadCallback = lambda sequence, result: post(LoadFinished(sequence, result))
        self._on_saved: SaveCallback = lambda sequence, stored: post(SaveFinished(sequence, stored))
        self._on_probed: ProbeCallback = lambda sequence, tokens: post(ProbeFinished(sequence, tokens))
        self._device = pool.keys.device
        self.prefill_budget = PrefillBudget(limits.max_prefill_step_seconds)
        self.admission = Admission(
            pool, self.prefix_cache, limits.max_num_batched_tokens, max_sequence_tokens, self.prefill_budget, connector
        )
        self.window_releaser = WindowReleaser(
            pool, connector, lambda sequence, stored: post(PartialSaveFinished(sequence, stored))
        )
        self.preempted_kv_saver = PreemptedKVSaver(
            pool, connector, lambda sequence, stored: post(PreemptionSaved(sequence, stored))
        )
        self._corrupt_hits = CorruptHits(pool, self.prefix_cache, connector, stats)
        self._finisher = RequestFinisher(pool, self.prefix_cache, connector, stats)
        self._recompute = RecomputeQueue(services.decoder, pool, self._max_piece_rows)
        batch_services = BatchServices(
            pool,
            self.prefix_cache,
            self.window_releaser,
            self.preempted_kv_saver,
            self.prefill_budget,
            services.speculator,
            limits.max_num_batched_tokens,
            max_sequence_tokens,
        )
        self._builder = BatchBuilder(batch_services, self.count_free_pages)
        self._sampler = SpeculativeSampler(
            services.speculator, self._builder.branch_tables, max_sequence_tokens, self._finish, self._sampling_failed
        )
        self._stuck = False

    @property
    def busy(self) -> bool:
        """True if the next step has work without a further event."""
        if self._stuck:
            return False
        elsewhere = self.loading or self.saving or self.window_releaser.busy or self.preempted_kv_saver.sequences
        return bool(self.running) or bool(self.waiting and not elsewhere)

    def live(self) -> list[Sequence]:
        """Sequences with blocks."""
        return [*self.running, *self.loading, *self.saving, *self.preempted_kv_saver.sequences]

    def count_free_pages(self) -> int:
        """Number of blocks that are free, or only in the prefix cache."""
        return self.pool.pages - self.pool.count_distinct_pages(self.tables())

    def count_free_overflow_pages(self) -> int:
        """Number of overflow blocks that are free, or only in the prefix cache."""
        held = sum(pages for table in self.tables() if table.in_overflow for _, pages in table.mapped_ranges)
        return self.pool.overflow_pages - held

    def tables(self) -> list[BlockTable]:
        """Block tables of live sequences, pending saves and draft branches."""
        live = (s.kv.table for s in self.live() if s.kv.table)
        return [*live, *self.window_releaser.tables, *self._builder.branch_tables.tables]

    # ---- events ---------------------------------------------------------------------------------------------

    def handle(self, event: EngineEvent) -> None:
        """Handles an event of another thread."""
        self._stuck = False
        match event:
            case RequestSubmitted(sequence):
                tokenized_seconds = sequence.timings.tokenize_ms / 1e3
                sequence.timestamps.queued_at = sequence.request.arrived_at + tokenized_seconds
                self.waiting.append(sequence)
            case LoadFinished(sequence, result):
                self._start(sequence, result)
                self.loading.discard(sequence)
            case SaveFinished(sequence, stored):
                self._finisher.retire(sequence, stored)
                self.saving.discard(sequence)
            case PartialSaveFinished(sequence, stored):
                self.window_releaser.finish_save(sequence, stored)
            case PreemptionSaved(sequence, stored):
                self.preempted_kv_saver.finish(sequence, stored)
                self._requeue(sequence)
            case ProbeFinished(sequence, tokens):
                sequence.queue.num_matched = tokens
            case CancelRequested(sequence):
                if self._remove(sequence):
                    self._finisher.cancel(sequence)
                else:
                    self._connector.forget(sequence)
            case EngineTask(run):
                run()

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """Ends a sequence with an error. Raises EngineLost."""
        if not isinstance(error, KVSidecarError):
            check_device(self._device, error)
        self._remove(sequence)
        self.loading.discard(sequence)
        self._builder.branch_tables.zero(sequence)
        self._finisher.fail(sequence, error)

    # ---- a step ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Runs one step: requeue failed loads, admit, plan, compute, sample."""
        for sequence in [s for s in self.running if s.kv.layers is not None and s.kv.layers.failed]:
            self._compute_uncached(sequence)
        for sequence in [s for s in self.running if s.kv.table is not None and not s.kv.table.in_overflow]:
            if self.admission.exceeds_pool(sequence):
                self._preempt(sequence)
        self._admit()
        recomputing = self._recompute.next(self.running)
        preemptions = self._stats.preemptions
        slices = self._run_batch(recomputing)
        if recomputing is not None and recomputing in self._recompute and not (slices and recomputing.kv.is_loading):
            self._recompute_piece(recomputing)
        # After a preemption another sequence can continue in the freed blocks, so the engine is not idle.
        preempted = self._stats.preemptions > preemptions
        idle = not slices and recomputing is None and not self._recompute and not preempted
        oldest = min((s for s in self.running if s.kv.is_loading), key=lambda s: s.request.arrived_at, default=None)
        if idle and oldest is not None and oldest.kv.layers is not None:
            oldest.kv.layers.wait_done()  # the loader posts no event when layers are loaded
        self._stuck = idle and oldest is None and bool(self.running)

    def _run_batch(self, recomputing: Sequence | None) -> bool:
        """Plans and computes a batch. False if the batch has no rows.

        If ``recomputing`` is a sequence, the batch has no prompt rows: a piece of the recompute runs in the same step.
        """
        ready = [
            s
            for s in self.running
            if s not in self._recompute and not (recomputing is not None and s.num_uncomputed > 1)
        ]
        try:
            decision = self._builder.decide(ready)
            for sequence in decision.preempted:
                self._preempt(sequence)
            batch = self._builder.build(decision)
            for sequence in batch.preempted:
                self._preempt(sequence)
            for sequence, error in batch.failed:
                self.fail(sequence, error)
            if batch.slices:
                self._forward(batch.slices)
        finally:
            self._builder.branch_tables.free()
        return bool(batch.slices)

    def _max_piece_rows(self) -> int:
        """Maximum rows of one piece of a selective recompute."""
        decoding = any(s.num_uncomputed == 1 and s not in self._recompute for s in self.running)
        max_rows = self.prefill_budget.max_rows if decoding else None
        return min(max_rows or self._limits.max_num_batched_tokens, self._limits.max_num_batched_tokens)

    def _admit(self) -> None:
        self.admission.wake_at = None
        while self.waiting and len(self.running) + len(self.loading) < self._limits.max_num_seqs:
            found = self.admission.next(self.waiting, self.live())
            if found is None:
                break
            sequence, source = found
            try:
                in_pool = [s for s in self.live() if s.kv.table is not None and not s.kv.table.in_overflow]
                reserve = scheduler.pages_to_reserve(self.pool.pages, len(in_pool))
                if not self.admission.allocate(sequence, source, self.count_free_pages(), reserve):
                    break
            except Exception as error:
                self.fail(sequence, error)
                continue
            self._stats.overflow_admissions += sequence.kv.table is not None and sequence.kv.table.in_overflow
            self.loading.add(sequence)
            self.waiting.remove(sequence)
            sequence.state, timestamps = SequenceState.LOADING, sequence.timestamps
            timestamps.admitted_at = time.perf_counter()
            sequence.timings.queue_ms += (timestamps.admitted_at - timestamps.queued_at) * 1e3
            sequence.trace.phase("queue", timestamps.queued_at, timestamps.admitted_at)
            if not timestamps.first_token_at:
                sequence.usage.num_pool_hits = sequence.kv.num_computed
            try:
                if sequence.reads_cache and self._connector.load(sequence, self.pool, self._on_loaded):
                    continue
            except Exception as error:
                self.fail(sequence, error)
                continue
            self._start(sequence, LoadResult())
            self.loading.discard(sequence)
        self.admission.probe(self.waiting, self._on_probed)

    def _start(self, sequence: Sequence, result: LoadResult) -> None:
        """Adds a loaded sequence to the batch."""
        apply_load_result(sequence, result)
        if self._finisher.finish_if_pending(sequence):
            return
        sequence.state, sequence.queue.steps_skipped = SequenceState.RUNNING, 0
        self.running.append(sequence)
        if sequence.grammar is not None:
            sequence.grammar.start_mask()  # computes the first mask during the prefill
        if sequence.kv.plan is not None:
            try:
                self._recompute.add(sequence)
            except Exception as error:
                self.fail(sequence, error)

    # ---- computing ------------------------------------------------------------------------------------------

    def _forward(self, slices: list[tuple[Sequence, forward_batch.SequenceSlice]]) -> None:
        """Computes a batch, and samples for each sequence whose last token is in it."""
        began = time.perf_counter()
        try:
            logits = collect(slices, self.compute([piece for _, piece in slices]))
            self._builder.branch_tables.check_finite(slices, logits)
        except LayerLoadFailed:
            # Nothing has recorded the progress of the other sequences yet, so the next step computes their rows again.
            for sequence in [s for s, _ in slices if s.kv.layers is not None and s.kv.layers.failed]:
                self._compute_uncached(sequence)
            return
        except Exception as error:
            if any(piece.num_draft_tokens for _, piece in slices):
                log.warning("a step with draft tokens failed; computing it without", error=str(error))
                self._forward([(s, piece.without_drafts()) for s, piece in slices])
                return
            if len(slices) == 1:
                self.fail(slices[0][0], error)
                return
            log.warning("a step failed; computing its sequences one by one", error=str(error))
            for one in slices:
                self._forward([one])
            return
        self._stats.steps += 1
        for sequence, piece in slices:
            sequence.kv.advance(len(piece.tokens) - piece.num_drafted)
            sequence.speculation.num_draft_tokens += piece.num_draft_tokens
            self.window_releaser.release(sequence)
        sampled = [one for one in slices if one[1].wants_logits]
        self._sampler.run(sampled, logits, self._decoder.likeliest(logits))
        seconds = time.perf_counter() - began
        self.prefill_budget.learn_step([piece for _, piece in slices], seconds)
        if all(piece.wants_logits and len(piece.tokens) == 1 + piece.num_drafted for _, piece in slices):
            drafted = sum(piece.num_draft_tokens for _, piece in slices)
            self._speculator.record_step(len(slices) + drafted, drafted, seconds)

    def compute(self, slices: list[forward_batch.SequenceSlice]) -> torch.Tensor:
        """Computes logits ``[wanted, vocabulary]``, valid until the next call."""
        if self._graphs is not None and self._graphs.serves(slices):
            logits = self._graphs(slices)
            if logits is not None:
                return logits
        return self._decoder.compute(slices, self.pool)

    def _finish(self, sequence: Sequence) -> None:
        """Starts to store a complete answer, and removes the sequence from the batch."""
        self._speculator.finish(sequence)
        # Add before removing: another thread that counts sequences must find this one in ``saving`` or ``running``.
        self.saving.add(sequence)
        self.running.remove(sequence)
        if not self._finisher.complete(sequence, self._on_saved):
            self.saving.discard(sequence)

    def _sampling_failed(self, sequence: Sequence, error: Exception) -> None:
        """Computes a sequence again if its cached prefix is corrupt; otherwise ends it with the error."""
        if isinstance(error, LogitsNotFinite) and self._corrupt_hits.drop(sequence):
            self._builder.branch_tables.zero(sequence)
            self._compute_uncached(sequence)
        else:
            self.fail(sequence, error)

    def _recompute_piece(self, sequence: Sequence) -> None:
        """Runs one piece of a selective recompute; after the last piece, samples the next token."""
        try:
            logits = self._recompute.run_piece(sequence)
        except LayerLoadFailed:
            self._compute_uncached(sequence)
            return
        except Exception as error:
            self.fail(sequence, error)
            return
        if logits is not None:
            self._stats.steps += 1
            self._sampler.sample([sequence], logits, [()])

    # ---- leaving the batch ----------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence) -> None:
        """Preempts a sequence: keeps its tokens elsewhere, frees its blocks, and puts it at the front of the queue."""
        self._remove(sequence)
        self._stats.preemptions += 1
        if self._finisher.move_to_overflow(sequence) or not self.preempted_kv_saver.save(sequence):
            self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        if self.admission.exceeds_pool(sequence):
            self._finisher.retain_prefix(sequence)  # admission to the overflow copies it from the prefix cache
        else:
            self._finisher.free_pages(sequence)
        sequence.restart()
        if not self._finisher.finish_if_pending(sequence):
            self.waiting.appendleft(sequence)

    def _compute_uncached(self, sequence: Sequence) -> None:
        """Returns a sequence to the queue after its load failed; it will not use the cache."""
        sequence.kv.load_failed = True
        self._preempt(sequence)

    def _remove(self, sequence: Sequence) -> bool:
        """Removes a sequence from queue or batch; False if it is in neither. Raises EngineLost."""
        if sequence.kv.layers is not None:
            sequence.kv.layers.wait_done()
        self._recompute.remove(sequence)
        self._speculator.forget(sequence)
        for place in (self.waiting, self.running):
            if sequence in place:
                place.remove(sequence)
                return True
        return False
