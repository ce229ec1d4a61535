"""What the engine's thread does: take letters, admit, plan, compute, advance.

One sequence's failure is its own. What raises for one sequence ends that one; when a forward of several raises, each is
computed alone, and who fails alone has failed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

import structlog
import torch
from kvsidecar.errors import GenerationFailed, KVSidecarError

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
from inference_svc.engine.engine_lost import check_device
from inference_svc.engine.engine_stats import EngineLimits, EngineStats
from inference_svc.engine.kv_connector import KVConnector, LoadCallback, LoadResult, ProbeCallback, SaveCallback
from inference_svc.engine.recompute_queue import RecomputeQueue
from inference_svc.engine.request_lifecycle import RequestFinisher, append_token
from inference_svc.engine.sequence import Sequence, SequenceState
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import PrefixCache
from inference_svc.kv_pool.window_release import WindowReleaser
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.cuda_graphs import CudaGraphs
from inference_svc.model_runner.decoder import Decoder
from inference_svc.model_runner.layerwise_load import LayerLoadFailed
from inference_svc.sampling.prompt_logprobs import collect
from inference_svc.sampling.sampler import LogitsNotFinite, SampleResult, sample
from inference_svc.scheduling import scheduler
from inference_svc.scheduling.admission import Admission
from inference_svc.scheduling.batch_planner import BatchPlanner
from inference_svc.scheduling.preemption import PreemptionSaver
from inference_svc.scheduling.prefill_budget import PrefillBudget
from inference_svc.spec_decode.speculator import Speculator
from inference_svc.spec_decode.tree_verifier import TreeVerifier

log = structlog.get_logger("engine")


class EngineCore:
    """All sequences of an engine. ``post`` takes letters from the cache's thread; all else is the engine's thread's."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        cache: KVConnector,
        limits: EngineLimits,
        longest: int,
        graphs: CudaGraphs | None,
        speculator: Speculator,
        stats: EngineStats,
        post: Callable[[EngineEvent], object],
    ) -> None:
        """``longest`` bounds the tokens of prompt and answer together."""
        self.pool, self.residents = pool, PrefixCache(pool, limits.residents)
        self.waiting: deque[Sequence] = deque()
        self.loading: set[Sequence] = set()
        self.running: list[Sequence] = []
        self.saving: set[Sequence] = set()
        self._decoder, self._cache, self._limits, self._longest = decoder, cache, limits, longest
        self._graphs, self._speculator, self._stats = graphs, speculator, stats
        self._on_loaded: LoadCallback = lambda sequence, restored: post(LoadFinished(sequence, restored))
        self._on_saved: SaveCallback = lambda sequence, stored: post(SaveFinished(sequence, stored))
        self._on_probed: ProbeCallback = lambda sequence, tokens: post(ProbeFinished(sequence, tokens))
        self._device = pool.keys.device
        self.pace = PrefillBudget(limits.prefill_step_seconds)
        self.admission = Admission(pool, self.residents, limits.batch_tokens, longest, self.pace, cache)
        self.passing = WindowReleaser(pool, cache, lambda sequence, stored: post(PartialSaveFinished(sequence, stored)))
        self.leaving = PreemptionSaver(pool, cache, lambda sequence, stored: post(PreemptionSaved(sequence, stored)))
        self._corrupt = CorruptHits(pool, self.residents, cache, stats)
        self._endings = RequestFinisher(pool, self.residents, cache, stats)
        self._repairs = RecomputeQueue(decoder, pool, self._repair_rows)
        self._planner = BatchPlanner(
            pool,
            self.residents,
            self.passing,
            self.leaving,
            speculator,
            limits.batch_tokens,
            longest,
            self.pace,
            self.count_free,
            self._preempt,
            self.fail,
        )
        self._stuck = False

    @property
    def busy(self) -> bool:
        """There is something to do without any further letter."""
        if self._stuck:
            return False
        away = self.loading or self.saving or self.passing.busy or self.leaving.sequences
        return bool(self.running) or bool(self.waiting and not away)

    def live(self) -> list[Sequence]:
        """The sequences with pages."""
        return [*self.running, *self.loading, *self.saving, *self.leaving.sequences]

    def count_free(self) -> int:
        """Pages that are free, or only kept for reuse."""
        return self.pool.pages - self.pool.distinct_pages(self.tables())

    def count_free_overflow(self) -> int:
        """The same of the overflow."""
        held = sum(pages for table in self.tables() if table.apart for _, pages in table.held)
        return self.pool.overflow_pages - held

    def tables(self) -> list[BlockTable]:
        """What is held of the pool, but for residents."""
        return [*(s.table for s in self.live() if s.table), *self.passing.tables, *self._planner.forks.tables]

    # ---- letters --------------------------------------------------------------------------------------------

    def read(self, letter: EngineEvent) -> None:
        """Takes over what another thread says."""
        self._stuck = False
        match letter:
            case RequestSubmitted(sequence):
                sequence.queued_at = sequence.arrived + sequence.timings.tokenize_ms / 1e3
                self.waiting.append(sequence)
            case LoadFinished(sequence, restored):
                self._start(sequence, restored)
                self.loading.discard(sequence)
            case SaveFinished(sequence, stored):
                self._endings.retire(sequence, stored)
                self.saving.discard(sequence)
            case PartialSaveFinished(sequence, stored):
                self.passing.stored(sequence, stored)
            case PreemptionSaved(sequence, stored):
                self.leaving.end(sequence, stored)
                self._wait_again(sequence)
            case ProbeFinished(sequence, tokens):
                sequence.expected_cached = tokens
            case CancelRequested(sequence):
                if self._take_out(sequence):
                    self._endings.cancel(sequence)
                else:
                    self._cache.forget(sequence)
            case EngineTask(work):
                work()

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """Ends a sequence by an error. Raises EngineLost."""
        if not isinstance(error, KVSidecarError):
            check_device(self._device, error)
        self._take_out(sequence)
        self.loading.discard(sequence)
        self._planner.forks.erase(sequence)
        self._endings.fail(sequence, error)

    # ---- a step ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One forward, and what comes with it."""
        for sequence in [s for s in self.running if s.gate is not None and s.gate.failed]:
            self._read_again(sequence)
        for sequence in [s for s in self.running if s.table is not None and not s.table.apart]:
            if self.admission.exceeds_pool(sequence):
                self._preempt(sequence)
        self._admit()
        repair = self._repairs.next(self.running)
        preemptions = self._stats.preemptions
        able = [s for s in self.running if s not in self._repairs and not (repair is not None and s.missing > 1)]
        try:
            spans = self._planner.plan(able)
            if spans:
                self._forward(spans)
        finally:
            self._planner.forks.release()
        if repair is not None and repair in self._repairs and not (spans and repair.gated):
            self._repair_piece(repair)
        # Pages that were given back let somebody else go on.
        given_back = self._stats.preemptions > preemptions
        idle = not spans and repair is None and not self._repairs and not given_back
        gated = min((s for s in self.running if s.gated), key=lambda s: s.arrived, default=None)
        if idle and gated is not None and gated.gate is not None:
            gated.gate.wait_done()  # of which there is no letter
        self._stuck = idle and gated is None and bool(self.running)

    def _repair_rows(self) -> int:
        """Rows of a piece of a repair."""
        most = self.pace.max_rows if any(s.missing == 1 and s not in self._repairs for s in self.running) else None
        return min(most or self._limits.batch_tokens, self._limits.batch_tokens)

    def _admit(self) -> None:
        self.admission.wake_at = None
        while self.waiting and len(self.running) + len(self.loading) < self._limits.batch_sequences:
            found = self.admission.next(self.waiting, self.live())
            if found is None:
                break
            sequence, source = found
            try:
                inside = [s for s in self.live() if s.table is not None and not s.table.apart]
                leave = scheduler.blocks_to_reserve(self.pool.pages, len(inside))
                if not self.admission.allocate(sequence, source, self.count_free(), leave):
                    break
            except Exception as error:
                self.fail(sequence, error)
                continue
            self._stats.overflowed += sequence.table is not None and sequence.table.apart
            self.loading.add(sequence)
            self.waiting.remove(sequence)
            sequence.state = SequenceState.LOADING
            sequence.admitted_at = time.perf_counter()
            sequence.timings.queue_ms += (sequence.admitted_at - sequence.queued_at) * 1e3
            sequence.trace.phase("queue", sequence.queued_at, sequence.admitted_at)
            if not sequence.first_token_at:
                sequence.resident_tokens = sequence.computed
            try:
                if sequence.cache.read and self._cache.load(sequence, self.pool, self._on_loaded):
                    continue
            except Exception as error:
                self.fail(sequence, error)
                continue
            self._start(sequence, LoadResult())
            self.loading.discard(sequence)
        self.admission.probe(self.waiting, self._on_probed)

    def _start(self, sequence: Sequence, restored: LoadResult) -> None:
        """Takes over what the cache found; the sequence is in the batch from now on."""
        sequence.table = restored.table or sequence.table
        sequence.computed = sequence.reused = max(sequence.computed, restored.tokens)
        sequence.gate, sequence.plan, sequence.repair = restored.gate, restored.plan, restored.repair
        if restored.stored is not None and restored.stored.covered >= sequence.stored.covered:
            sequence.stored = restored.stored
        sequence.timings.lookup_ms += restored.lookup_ms
        sequence.timings.transfer_ms += restored.transfer_ms
        sequence.timings.restore_ms += restored.restore_ms
        sequence.started_at = time.perf_counter()
        if restored.looked_up_at:
            sequence.trace.phase("restore", restored.looked_up_at, sequence.started_at)
        if not sequence.first_token_at:
            approximate = len(restored.plan.approximate_positions) if restored.plan else 0
            sequence.cached_tokens, sequence.approximate_tokens = sequence.computed + approximate, approximate
        if self._endings.due(sequence):
            return
        sequence.state, sequence.passed_over = SequenceState.RUNNING, 0
        self.running.append(sequence)
        if sequence.steering is not None:
            sequence.steering.start_mask()  # while the prompt is read
        if sequence.plan is not None:
            try:
                self._repairs.begin(sequence)
            except Exception as error:
                self.fail(sequence, error)

    # ---- computing ------------------------------------------------------------------------------------------

    def _forward(self, spans: list[tuple[Sequence, forward_batch.SequenceSlice]]) -> None:
        """Computes the spans' rows and advances the sequences whose last token was among them."""
        began = time.perf_counter()
        try:
            logits = collect(spans, self.compute([span for _, span in spans]))
            self._planner.forks.check(spans, logits)
        except LayerLoadFailed:
            # What others computed in this step they compute again in the next: nothing of it was counted.
            for sequence in [s for s, _ in spans if s.gate is not None and s.gate.failed]:
                self._read_again(sequence)
            return
        except Exception as error:
            if any(span.guessed for _, span in spans):
                log.warning("a forward with guesses failed; it is computed without", error=str(error))
                self._forward([(s, span.without_guesses()) for s, span in spans])
                return
            if len(spans) == 1:
                self.fail(spans[0][0], error)
                return
            log.warning("a forward failed; its sequences are computed one by one", error=str(error))
            for one in spans:
                self._forward([one])
            return
        self._stats.steps += 1
        for sequence, span in spans:
            sequence.computed += len(span.tokens) - span.drafted
            sequence.draft_tokens += span.guessed
            self.passing.move(sequence)
        self._advance([one for one in spans if one[1].wants_logits], logits)
        seconds = time.perf_counter() - began
        self.pace.learn_step([span for _, span in spans], seconds)
        if all(span.wants_logits and len(span.tokens) == 1 + span.drafted for _, span in spans):
            guessed = sum(span.guessed for _, span in spans)
            self._speculator.passed(len(spans) + guessed, guessed, seconds)

    def compute(self, spans: list[forward_batch.SequenceSlice]) -> torch.Tensor:
        """Logits ``[wanted, vocabulary]``, valid until the next call."""
        if self._graphs is not None and self._graphs.serves(spans):
            logits = self._graphs(spans)
            if logits is not None:
                return logits
        return self._decoder(forward_batch.build_batch(spans, self.pool, self._device))

    def _advance(self, spans: list[tuple[Sequence, forward_batch.SequenceSlice]], logits: torch.Tensor) -> None:
        """Draws a token of each sequence, and goes on as long as what was drawn is what had been guessed: so every
        token is drawn as it is without guesses, from the same distribution by the same random number."""
        known, walk = [len(sequence.tokens) for sequence, _ in spans], TreeVerifier(spans, logits, self._planner.forks)
        while walk.sequences:
            walk.go_on(self._draw(walk.sequences, walk.logits, walk.guesses))
        for i, (sequence, _) in enumerate(spans):
            self._speculator.judge(sequence, walk.verified(i), sequence.tokens[known[i] :])
            if sequence.state is not SequenceState.RUNNING:
                self._speculator.forget(sequence)

    def _draw(self, sequences: list[Sequence], logits: torch.Tensor, guesses: list[Collection[int]]) -> list[bool]:
        """Advances sequences by what is drawn from their rows of logits, and says which go on because it was among
        what had been guessed."""
        try:
            found = sample(logits, [s.sampler for s in sequences])
        except Exception as error:
            if len(sequences) == 1:
                self.fail(sequences[0], error)
                return [False]
            parts = [self._draw([one], logits[i : i + 1], guesses[i : i + 1]) for i, one in enumerate(sequences)]
            return [part for (part,) in parts]
        return [self._take(s, drawn, guess) for s, drawn, guess in zip(sequences, found, guesses, strict=True)]

    def _take(self, sequence: Sequence, drawn: SampleResult, guesses: Collection[int]) -> bool:
        """Adds what was drawn to an answer. True when that was guessed and the answer goes on."""
        if isinstance(drawn, GenerationFailed):
            if isinstance(drawn, LogitsNotFinite) and self._corrupt.drop(sequence):
                self._planner.forks.erase(sequence)
                self._read_again(sequence)
            else:
                self.fail(sequence, drawn)
            return False
        right = drawn.token in guesses
        sequence.accepted_tokens += right
        try:
            finish = append_token(sequence, drawn, self._longest)
        except Exception as error:
            self.fail(sequence, error)
            return False
        if finish is None:
            return right
        self._speculator.finish(sequence)
        # Before it leaves the running ones: whoever asks for the load meanwhile must find it in one of them.
        self.saving.add(sequence)
        self.running.remove(sequence)
        if not self._endings.complete(sequence, self._on_saved):
            self.saving.discard(sequence)
        return False

    def _repair_piece(self, sequence: Sequence) -> None:
        """One piece of a repair; at its end the first token."""
        try:
            logits = self._repairs.piece(sequence)
        except LayerLoadFailed:
            self._read_again(sequence)
            return
        except Exception as error:
            self.fail(sequence, error)
            return
        if logits is not None:
            self._stats.steps += 1
            self._draw([sequence], logits, [()])

    # ---- leaving the batch ----------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence) -> None:
        """Sends a sequence back to the queue's front without its pages, once what it computed is stored."""
        self._take_out(sequence)
        self._stats.preemptions += 1
        if not self.leaving.begin(sequence):
            self._wait_again(sequence)

    def _wait_again(self, sequence: Sequence) -> None:
        if self.admission.exceeds_pool(sequence):
            self._endings.set_aside(sequence)  # the overflow gets it from there
        else:
            self._endings.release(sequence)
        sequence.restart()
        if not self._endings.due(sequence):
            self.waiting.appendleft(sequence)

    def _read_again(self, sequence: Sequence) -> None:
        """Sends a sequence whose loading failed back to the queue, to be computed without the cache."""
        sequence.cache, sequence.lost = replace(sequence.cache, read=False), True
        self._preempt(sequence)

    def _take_out(self, sequence: Sequence) -> bool:
        """Takes a sequence off the queue or out of the batch; False when it is in neither. Raises EngineLost before."""
        if sequence.gate is not None:
            sequence.gate.wait_done()
        self._repairs.drop(sequence)
        self._speculator.forget(sequence)
        for place in (self.waiting, self.running):
            if sequence in place:
                place.remove(sequence)
                return True
        return False
