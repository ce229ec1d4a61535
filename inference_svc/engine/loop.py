"""What the engine's thread does: take letters, admit, plan, compute, advance.

One sequence's failure is its own. What raises for one sequence ends that one; when a forward of several raises, each is
computed alone, and who fails alone has failed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import structlog
import torch
from kvsidecar.errors import GenerationFailed, Unavailable

from inference_svc.engine import rows, scheduler
from inference_svc.engine.admission import Admission
from inference_svc.engine.cache_port import Cache, Restored
from inference_svc.engine.decode_graphs import DecodeGraphs
from inference_svc.engine.drawing import draw
from inference_svc.engine.finish import Endings, take_token
from inference_svc.engine.forward import Decoder
from inference_svc.engine.gate import RestoreFailed
from inference_svc.engine.mailbox import CancelAsked, Letter, Loaded, Probed, Saved, Submitted
from inference_svc.engine.pool import PAGE_TOKENS, KVPool
from inference_svc.engine.repair import Repairing
from inference_svc.engine.residents import Residents
from inference_svc.engine.sequence import Finish, Output, Sequence, State, StoredPrefix
from inference_svc.engine.stats import EngineLimits, EngineStats

log = structlog.get_logger("engine")


class Loop:
    """All sequences of an engine. ``post`` takes letters from the cache's thread; all else is the engine's thread's."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        cache: Cache,
        limits: EngineLimits,
        longest: int,
        graphs: DecodeGraphs | None,
        stats: EngineStats,
        post: Callable[[Letter], object],
    ) -> None:
        """``longest`` bounds the tokens of prompt and answer together."""
        self.pool, self.residents = pool, Residents(pool, limits.residents)
        self.waiting: deque[Sequence] = deque()
        self.loading: set[Sequence] = set()
        self.running: list[Sequence] = []
        self.saving: set[Sequence] = set()
        self._decoder, self._cache, self._limits, self._longest = decoder, cache, limits, longest
        self._graphs, self._stats, self._post = graphs, stats, post
        self._device = pool.keys.device
        self._admission = Admission(pool, self.residents)
        self._endings = Endings(pool, self.residents, cache, stats)
        self._repairs: dict[Sequence, tuple[Repairing, Iterator[int]]] = {}
        self._repairs_turn = False
        self._stuck = False

    @property
    def busy(self) -> bool:
        """There is something to do without any further letter."""
        if self._stuck:
            return False
        return bool(self.running) or (bool(self.waiting) and not self.loading and not self.saving)

    def live(self) -> list[Sequence]:
        """The sequences with pages."""
        return [*self.running, *self.loading, *self.saving]

    def count_free(self) -> int:
        """Pages that are free, or only kept for reuse."""
        return self.pool.pages - self.pool.distinct_pages([s.table for s in self.live() if s.table])

    # ---- letters --------------------------------------------------------------------------------------------

    def read(self, letter: Letter) -> None:
        """Takes over what another thread says."""
        self._stuck = False
        match letter:
            case Submitted(sequence):
                sequence.queued_at = sequence.arrived + sequence.timings.tokenize_ms / 1e3
                self.waiting.append(sequence)
            case Loaded(sequence, restored):
                self._start(sequence, restored)
                self.loading.discard(sequence)
            case Saved(sequence, stored):
                self._endings.retire(sequence, stored)
                self.saving.discard(sequence)
            case Probed(sequence, tokens):
                sequence.expected_cached = tokens
            case CancelAsked(sequence):
                if self._take_out(sequence):
                    self._endings.cancel(sequence)

    def shut_down(self) -> None:
        """Fails all that is not finished. Other workers may take it over."""
        error = Unavailable("the worker is shutting down; send the request to another one")
        for sequence in [*self.waiting, *self.running, *self.loading]:
            sequence.sink(Output(finish=Finish.FAILED, error=error))

    def fail_all(self, error: Exception) -> None:
        """The last resort, when a step itself is broken: everything that it may have been about ends."""
        for sequence in [*self.running, *self.waiting]:
            self._fail(sequence, error)

    # ---- a step ---------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One forward, and what comes with it."""
        for sequence in [s for s in self.running if s.gate is not None and s.gate.failed]:
            self._read_again(sequence)
        self._admit()
        repair = self._next_repair()
        preemptions = self._stats.preemptions
        spans = self._plan(decoding_only=repair is not None)
        if spans:
            self._forward(spans)
        if repair is not None and repair in self._repairs and not (spans and _gated(repair)):
            self._repair_piece(repair)
        # Pages that were given back let somebody else go on.
        given_back = self._stats.preemptions > preemptions
        self._stuck = not spans and repair is None and not given_back and bool(self.running)

    def _admit(self) -> None:
        while self.waiting and len(self.running) + len(self.loading) < self._limits.batch_sequences:
            found = self._admission.next(self.waiting, self.live())
            if found is None:
                break
            sequence, source = found
            try:
                leave = scheduler.reserve(self.pool.pages, len(self.live()))
                if not self._admission.allocate(sequence, source, self.count_free(), leave):
                    break
            except Exception as error:
                self._fail(sequence, error)
                continue
            self.loading.add(sequence)
            self.waiting.remove(sequence)
            sequence.state = State.LOADING
            now = time.perf_counter()
            sequence.timings.queue_ms += (now - sequence.queued_at) * 1e3
            if not sequence.first_token_at:
                sequence.resident_tokens = sequence.computed
            try:
                if sequence.cache.read and self._cache.load(sequence, self.pool, self._on_loaded):
                    continue
            except Exception as error:
                self._fail(sequence, error)
                continue
            self._start(sequence, Restored())
            self.loading.discard(sequence)
        for sequence in self.waiting:
            if not sequence.probed:
                sequence.probed = True
                try:
                    self._cache.probe(sequence, self._on_probed)
                except Exception:  # it only tells whom to admit first
                    log.exception("probing failed", request=sequence.id)

    def _start(self, sequence: Sequence, restored: Restored) -> None:
        """Takes over what the cache found; the sequence is in the batch from now on."""
        sequence.computed = max(sequence.computed, restored.tokens)
        sequence.gate, sequence.plan, sequence.repair = restored.gate, restored.plan, restored.repair
        if restored.stored is not None and restored.stored.covered >= sequence.stored.covered:
            sequence.stored = restored.stored
        sequence.timings.lookup_ms += restored.lookup_ms
        sequence.timings.transfer_ms += restored.transfer_ms
        sequence.timings.restore_ms += restored.restore_ms
        sequence.started_at = time.perf_counter()
        if not sequence.first_token_at:
            approximate = len(restored.plan.approximate_positions) if restored.plan else 0
            sequence.cached_tokens, sequence.approximate_tokens = sequence.computed + approximate, approximate
        if sequence.cancelled.is_set():
            self._endings.cancel(sequence)
            return
        sequence.state, sequence.passed_over = State.RUNNING, 0
        self.running.append(sequence)
        if sequence.steering is not None:
            sequence.steering.look_ahead()  # while the prompt is read
        if sequence.plan is not None:
            try:
                self._begin_repair(sequence)
            except Exception as error:
                self._fail(sequence, error)

    def _plan(self, decoding_only: bool) -> list[tuple[Sequence, rows.Span]]:
        """The spans of the next forward, with room for their keys and values."""
        able = [s for s in self.running if s not in self._repairs and not (decoding_only and s.missing > 1)]
        works = [self._work(s) for s in able]
        step = scheduler.plan(works, self._limits.batch_tokens, self.count_free(), PAGE_TOKENS)
        for i in step.preempted:
            self._preempt(able[i])
        spans = []
        for sequence in able:
            sequence.passed_over += 1
        for i, count in step.rows:
            sequence = able[i]
            assert sequence.table is not None
            end = sequence.computed + count
            while not self.pool.grow(sequence.table, end):
                if not self.residents.evict():
                    break
            if sequence.table.tokens < end:  # fewer pages than were counted
                self._preempt(sequence)
                continue
            sequence.passed_over = 0
            piece, last = sequence.tokens[sequence.computed : end], end == len(sequence.tokens)
            spans.append((sequence, rows.Span(piece, sequence.computed, sequence.table, last, gate=sequence.gate)))
        return spans

    def _work(self, sequence: Sequence) -> scheduler.Work:
        assert sequence.table is not None
        return scheduler.Work(
            arrived=sequence.arrived,
            missing=sequence.missing,
            room=sequence.table.tokens - sequence.computed,
            pages=self.pool.own_pages(sequence.table),
            passed_over=sequence.passed_over,
            gated=_gated(sequence),
        )

    # ---- computing ------------------------------------------------------------------------------------------

    def _forward(self, spans: list[tuple[Sequence, rows.Span]]) -> None:
        """Computes the spans' rows and advances the sequences whose last token was among them."""
        try:
            logits = self._logits([span for _, span in spans])
        except RestoreFailed:
            # What others computed in this step they compute again in the next: nothing of it was counted.
            for sequence in [s for s, _ in spans if s.gate is not None and s.gate.failed]:
                self._read_again(sequence)
            return
        except Exception as error:
            if len(spans) == 1:
                self._fail(spans[0][0], error)
                return
            log.warning("a forward failed; its sequences are computed one by one", error=str(error))
            for one in spans:
                self._forward([one])
            return
        self._stats.steps += 1
        for sequence, span in spans:
            sequence.computed += len(span.tokens)
        self._draw([s for s, span in spans if span.wants_logits], logits)

    def _logits(self, spans: list[rows.Span]) -> torch.Tensor:
        if self._graphs is not None and self._graphs.serves(spans):
            logits = self._graphs(spans)
            if logits is not None:
                return logits
        return self._decoder(rows.build(spans, self.pool, self._device))

    def _draw(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Advances sequences by what is drawn from their rows of logits."""
        try:
            found = draw(logits, [s.sampler for s in sequences])
        except Exception as error:
            if len(sequences) == 1:
                self._fail(sequences[0], error)
                return
            for i, one in enumerate(sequences):
                self._draw([one], logits[i : i + 1])
            return
        for sequence, drawn in zip(sequences, found, strict=True):
            if isinstance(drawn, GenerationFailed):
                self._fail(sequence, drawn)
                continue
            try:
                finish = take_token(sequence, drawn, self._longest)
            except Exception as error:
                self._fail(sequence, error)
                continue
            if finish is not None:
                # Before it leaves the running ones: whoever asks for the load meanwhile must find it in one of them.
                self.saving.add(sequence)
                self.running.remove(sequence)
                if not self._endings.complete(sequence, self._on_saved):
                    self.saving.discard(sequence)

    # ---- repairing ------------------------------------------------------------------------------------------

    def _begin_repair(self, sequence: Sequence) -> None:
        assert sequence.plan is not None
        assert sequence.table is not None
        assert sequence.repair is not None, "a plan without a repair"
        work = Repairing(
            self._decoder,
            self.pool,
            sequence.tokens,
            sequence.table,
            sequence.plan,
            sequence.repair.repair,
            sequence.repair.ratio,
            piece_rows=self._limits.batch_tokens,
            gate=sequence.gate,
        )
        self._repairs[sequence] = work, work.steps()

    def _next_repair(self) -> Sequence | None:
        """Whose repair goes on in this step: one after the other, and in turns with what prompts there are, so that a
        step has no more rows than a batch may have, and what decodes."""
        ready = [s for s in self._repairs if not _gated(s)] or list(self._repairs)
        prompts = any(s.missing > 1 and s not in self._repairs for s in self.running)
        self._repairs_turn = not (prompts and self._repairs_turn)
        if not ready or not self._repairs_turn:
            return None
        self._repairs[ready[0]] = self._repairs.pop(ready[0])
        return ready[0]

    def _repair_piece(self, sequence: Sequence) -> None:
        """One piece of a repair; at its end the first token."""
        work, steps = self._repairs[sequence]
        try:
            if next(steps, None) is not None:
                return
        except RestoreFailed:
            self._read_again(sequence)
            return
        except Exception as error:
            self._fail(sequence, error)
            return
        del self._repairs[sequence]
        if not sequence.first_token_at:
            sequence.recomputed_tokens = work.recomputed
        sequence.computed = len(sequence.tokens)
        self._stats.steps += 1
        self._draw([sequence], work.logits[-1][-1:])

    # ---- leaving the batch ----------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence) -> None:
        """Sends a sequence back to the queue's front without its pages."""
        self._take_out(sequence)
        self._endings.release(sequence)
        sequence.computed, sequence.plan = 0, None
        if not sequence.first_token_at:
            sequence.cached_tokens = sequence.approximate_tokens = sequence.recomputed_tokens = 0
        sequence.preempted = True
        sequence.state, sequence.queued_at = State.WAITING, time.perf_counter()
        self.waiting.appendleft(sequence)
        self._stats.preemptions += 1

    def _read_again(self, sequence: Sequence) -> None:
        """Sends a sequence whose loading failed back to the queue, to be computed without the cache."""
        sequence.cache = replace(sequence.cache, read=False)
        self._preempt(sequence)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        self._take_out(sequence)
        self.loading.discard(sequence)
        self._endings.fail(sequence, error)

    def _take_out(self, sequence: Sequence) -> bool:
        """Takes a sequence off the queue or out of the batch; False when it is in neither."""
        self._repairs.pop(sequence, None)
        for place in (self.waiting, self.running):
            if sequence in place:
                place.remove(sequence)
                return True
        return False

    # ---- from the cache's thread ----------------------------------------------------------------------------

    def _on_loaded(self, sequence: Sequence, restored: Restored) -> None:
        self._post(Loaded(sequence, restored))

    def _on_saved(self, sequence: Sequence, stored: StoredPrefix | None) -> None:
        self._post(Saved(sequence, stored))

    def _on_probed(self, sequence: Sequence, tokens: int) -> None:
        self._post(Probed(sequence, tokens))


def _gated(sequence: Sequence) -> bool:
    """Layers are still being loaded: whoever computes with it may have to wait."""
    return sequence.gate is not None and not sequence.gate.done
