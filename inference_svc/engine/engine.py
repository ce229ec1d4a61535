"""The engine: one thread that batches rows of all running sequences, step by step.

A step takes one row of every decoding sequence and fills the token budget with pieces of prompts. Loading from
and storing to the cache happen on the cache's own thread; a sequence's pages belong to that thread meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import structlog
import torch
from kvsidecar.errors import GenerationFailed, Overloaded, PromptTooLong, Unavailable

from inference_svc.engine import rows
from inference_svc.engine.admission import Admission, as_array
from inference_svc.engine.decode_graphs import decode_graphs
from inference_svc.engine.drawing import draw
from inference_svc.engine.forward import Decoder
from inference_svc.engine.gate import RestoreFailed
from inference_svc.engine.pool import PAGE_TOKENS, KVPool
from inference_svc.engine.repair import Repairing
from inference_svc.engine.residents import Resident, Residents
from inference_svc.engine.sampling import Drawn
from inference_svc.engine.sequence import Finish, Output, Sequence, State
from inference_svc.model.loader import LoadedModel

log = structlog.get_logger("engine")


class Cache(Protocol):
    """What the engine needs of the cache. The calls return at once; the callbacks come on another thread."""

    def load(self, sequence: Sequence, pool: KVPool, done: LoadDone) -> bool:
        """Begins to fill the sequence's pages behind its computed tokens with what is stored; False when there is
        nothing to try."""
        ...

    def probe(self, sequence: Sequence) -> None:
        """Finds out, at its leisure, ``expected_cached`` of a sequence that waits."""
        ...

    def save(self, sequence: Sequence, pool: KVPool, done: SaveDone) -> bool:
        """Begins to store the sequence's pages; False when there is nothing to store."""
        ...


class LoadDone(Protocol):
    def __call__(self, sequence: Sequence, tokens: int) -> None: ...


class SaveDone(Protocol):
    def __call__(self, sequence: Sequence, stored_tokens: int) -> None: ...


class NoCache:
    """No daemon: only what the pool still holds is reused."""

    def load(self, sequence: Sequence, pool: KVPool, done: LoadDone) -> bool:
        return False

    def probe(self, sequence: Sequence) -> None:
        pass

    def save(self, sequence: Sequence, pool: KVPool, done: SaveDone) -> bool:
        return False


@dataclass
class EngineStats:
    """Counters since the start."""

    requests: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    resident_tokens: int = 0
    approximate_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


@dataclass(frozen=True)
class EngineLimits:
    """Bounds of the batch."""

    batch_tokens: int = 512
    batch_sequences: int = 64
    waiting: int = 1024
    residents: int = 64


class Engine:
    """Runs sequences. ``submit`` and ``cancel`` may be called from any thread; all else is the engine's own."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KVPool,
        cache: Cache,
        limits: EngineLimits | None = None,
        threads: int = 0,
    ) -> None:
        self.loaded, self.pool, self.stats = loaded, pool, EngineStats()
        self.decoder = Decoder(loaded)
        self._cache = cache
        self._limits = limits or EngineLimits()
        self._graphs = decode_graphs(self.decoder, pool, self._limits.batch_sequences)
        self._residents = Residents(pool, self._limits.residents)
        self._admission = Admission(pool, self._residents)
        self._wake = threading.Condition()
        self._inbox: deque[Sequence] = deque()
        self._loaded: deque[tuple[Sequence, int]] = deque()
        self._saved: deque[tuple[Sequence, int]] = deque()
        self._waiting: deque[Sequence] = deque()
        self._loading: set[Sequence] = set()
        self._running: list[Sequence] = []
        self._saving: set[Sequence] = set()
        self._repairs: dict[Sequence, tuple[Repairing, Iterator[int]]] = {}
        self._free_pages = pool.pages
        self._stepping = threading.Lock()
        self._stopping = False
        self._threads = threads
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._ready.wait()

    # ---- from any thread ------------------------------------------------------------------------------------

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together: the model's, or the pool's if that is less."""
        return min(self.loaded.context_length, self.pool.pages * PAGE_TOKENS)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises PromptTooLong, Overloaded, Unavailable."""
        if sequence.prompt_tokens + 1 > self.context_length:
            raise PromptTooLong(
                f"the prompt has {sequence.prompt_tokens} tokens; with one token of answer at most "
                f"{self.context_length} are allowed"
            )
        with self._wake:
            if self._stopping:
                raise Unavailable("the worker is shutting down; send the request to another one")
            if len(self._inbox) + len(self._waiting) >= self._limits.waiting:
                raise Overloaded(f"{self._limits.waiting} requests wait already; try again later")
            self._inbox.append(sequence)
            self._wake.notify()

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence at the next step; its pages are free then. Idempotent."""
        sequence.cancelled.set()
        with self._wake:
            self._wake.notify()

    @property
    def load(self) -> tuple[int, int, int]:
        """Sequences running, waiting, being saved."""
        return len(self._running) + len(self._loading), len(self._inbox) + len(self._waiting), len(self._saving)

    def stop(self) -> None:
        """Ends the thread after the current step; unfinished sequences fail. Blocks."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is held by live sequences and residents only."""
        with self._stepping:
            self.pool.check_integrity()
            tables = [s.table for s in self._live() if s.table] + self._residents.tables
            assert self.pool.held_by(tables), "pages are held by nobody, or by more than are counted"

    @property
    def free_pages(self) -> int:
        """Pages that a new sequence could have, as of the last step: free, or only kept for reuse."""
        return self._free_pages

    @property
    def resident_sequences(self) -> int:
        """Finished sequences that are kept for reuse."""
        return len(self._residents)

    def resident(self, number: int) -> Resident:
        """One of them, the least recently used first. Call it when idle."""
        with self._stepping:
            return self._residents.held[number]

    def _count_free(self) -> int:
        return self.pool.pages - self.pool.distinct_pages([s.table for s in self._live() if s.table])

    def _live(self) -> list[Sequence]:
        """The sequences with pages."""
        return [*self._running, *self._loading, *self._saving]

    def _warm_up(self) -> None:
        """Runs every kernel once, so that none is compiled while a request waits."""
        for count in (1, 64):
            table = self.pool.allocate(count)
            if table is not None:
                span = rows.Span([0] * count, 0, table, True)
                self.decoder(rows.build([span], self.pool, self.loaded.device))
                self.pool.free(table)

    # ---- the engine's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        self._warm_up()
        self._ready.set()
        while True:
            with self._wake:
                self._wake.wait_for(self._has_work)
                if self._stopping:
                    break
            try:
                with self._stepping:
                    self._step()
                    self._free_pages = self._count_free()
            except Exception as error:
                log.exception("step failed")
                for sequence in list(self._running):
                    self._end(sequence, Finish.FAILED, f"{type(error).__name__}: {error}")
        for sequence in [*self._inbox, *self._waiting, *self._running, *self._loading]:
            sequence.sink(Output(finish=Finish.FAILED, error="the worker is shutting down"))

    def _has_work(self) -> bool:
        if self._stopping or self._inbox or self._loaded or self._saved or self._running:
            return True
        if any(s.cancelled.is_set() for s in self._waiting):
            return True
        return bool(self._waiting) and not self._loading and not self._saving

    def _step(self) -> None:
        self._collect()
        self._drop_cancelled()
        self._admit()
        spans = self._plan()
        try:
            if spans:
                self._forward(spans)
            for sequence in list(self._repairs):
                self._repair_piece(sequence)
        except RestoreFailed:
            # What others computed in this step they compute again in the next: nothing of it was counted.
            for sequence in [s for s in self._running if s.gate is not None and s.gate.failed]:
                self._read_again(sequence)

    def _read_again(self, sequence: Sequence) -> None:
        """Sends a sequence whose loading failed back to the queue, to be computed without the cache."""
        sequence.cache = replace(sequence.cache, read=False)
        sequence.cached_tokens = 0
        self._preempt(sequence)

    def _forward(self, spans: list[tuple[Sequence, rows.Span]]) -> None:
        """Computes the spans' rows and advances the sequences whose last token was among them."""
        logits = self._logits([span for _, span in spans])
        self.stats.steps += 1
        for sequence, span in spans:
            sequence.computed += len(span.tokens)
        self._draw([s for s, span in spans if span.wants_logits], logits)

    def _draw(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Advances sequences by what is drawn from their rows of logits."""
        for sequence, drawn in zip(sequences, draw(logits, [s.sampler for s in sequences]), strict=True):
            if isinstance(drawn, GenerationFailed):
                self._end(sequence, Finish.FAILED, str(drawn))
                continue
            sequence.sampler.accept(drawn.token)
            self._advance(sequence, drawn)

    def _logits(self, spans: list[rows.Span]) -> torch.Tensor:
        if self._graphs is not None and self._graphs.serves(spans):
            logits = self._graphs(spans)
            if logits is not None:
                return logits
        return self.decoder(rows.build(spans, self.pool, self.loaded.device))

    def _repair_piece(self, sequence: Sequence) -> None:
        """One piece of a repair; at its end the first token."""
        work, steps = self._repairs[sequence]
        if next(steps, None) is not None:
            return
        del self._repairs[sequence]
        sequence.recomputed_tokens = work.recomputed
        sequence.computed = len(sequence.tokens)
        self.stats.steps += 1
        self._draw([sequence], work.logits[-1][-1:])

    def _begin_repair(self, sequence: Sequence) -> None:
        assert sequence.plan is not None
        assert sequence.table is not None
        assert sequence.repair is not None, "a plan without a repair"
        work = Repairing(
            self.decoder,
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

    def _collect(self) -> None:
        """Takes over what other threads have left."""
        while self._inbox:
            self._waiting.append(self._inbox.popleft())
        while self._loaded:
            sequence, tokens = self._loaded.popleft()
            self._loading.discard(sequence)
            sequence.computed = max(sequence.computed, tokens)
            self._start(sequence)
        while self._saved:
            sequence, stored = self._saved.popleft()
            self._saving.discard(sequence)
            self._retire(sequence)
            sequence.state = State.DONE
            sequence.sink(Output(stored_tokens=stored))

    def _drop_cancelled(self) -> None:
        for sequence in [s for s in self._running if s.cancelled.is_set()]:
            self._end(sequence, Finish.CANCELLED)
        for sequence in [s for s in self._waiting if s.cancelled.is_set()]:
            self._waiting.remove(sequence)
            self._end(sequence, Finish.CANCELLED)

    def _admit(self) -> None:
        while self._waiting and len(self._running) + len(self._loading) < self._limits.batch_sequences:
            found = self._admission.next(self._waiting, self._live())
            if found is None or not self._admission.allocate(*found):
                break
            sequence = found[0]
            self._waiting.remove(sequence)
            sequence.timings.queue_ms += (time.perf_counter() - sequence.arrived) * 1e3 - sequence.timings.tokenize_ms
            self.stats.resident_tokens += sequence.computed
            if sequence.cache.read and self._cache.load(sequence, self.pool, self._on_loaded):
                sequence.state = State.LOADING
                self._loading.add(sequence)
            else:
                self._start(sequence)
        for sequence in self._waiting:
            if not sequence.probed:
                sequence.probed = True
                self._cache.probe(sequence)

    def _start(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        sequence.started_at = time.perf_counter()
        if not sequence.preempted:
            sequence.cached_tokens = sequence.computed + sequence.approximate_tokens
        self._running.append(sequence)
        if sequence.plan is not None:
            self._begin_repair(sequence)
        if sequence.cancelled.is_set():
            self._end(sequence, Finish.CANCELLED)

    def _plan(self) -> list[tuple[Sequence, rows.Span]]:
        """Decoding sequences first, one row each; then prompts, oldest first, within the token budget."""
        budget = self._limits.batch_tokens
        spans: list[tuple[Sequence, rows.Span]] = []
        ordered = sorted(self._running, key=lambda s: s.missing > 1)
        for sequence in ordered:
            if budget <= 0 or sequence.state is not State.RUNNING or sequence in self._repairs:
                continue
            count = min(sequence.missing, budget)
            if not self._make_room(sequence, sequence.computed + count):
                continue
            assert sequence.table is not None
            end = sequence.computed + count
            piece = sequence.tokens[sequence.computed : end]
            last = end == len(sequence.tokens)
            span = rows.Span(piece, sequence.computed, sequence.table, last, gate=sequence.gate)
            spans.append((sequence, span))
            budget -= count
        # Making room for a later sequence may have sent an earlier one back to the queue.
        return [(s, span) for s, span in spans if s.state is State.RUNNING]

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Grows a sequence's pages. Residents go if they must, then the youngest others, back to the queue."""
        assert sequence.table is not None
        while not self.pool.grow(sequence.table, tokens):
            if self._residents.evict():
                continue
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._repairs.pop(sequence, None)
        self._free(sequence)
        sequence.computed, sequence.plan = 0, None
        sequence.preempted = True
        sequence.state = State.WAITING
        self._waiting.appendleft(sequence)
        self.stats.preemptions += 1

    def _advance(self, sequence: Sequence, drawn: Drawn) -> None:
        """Takes a new token: text, stop conditions, output."""
        now = time.perf_counter()
        if not sequence.first_token_at:
            sequence.first_token_at = now
            sequence.timings.prefill_ms = (now - sequence.started_at) * 1e3
            sequence.timings.ttft_ms = (now - sequence.arrived) * 1e3
        sequence.tokens.append(drawn.token)
        ended = drawn.token in sequence.stop_tokens
        text = "" if ended else sequence.text.push(drawn.token)
        finish = None
        if ended or sequence.text.stopped:
            finish = Finish.STOP
        elif sequence.generated >= sequence.max_tokens or len(sequence.tokens) >= self.context_length:
            finish = Finish.LENGTH
        if finish is not None:
            text += sequence.text.finish()
            sequence.timings.decode_ms = (now - sequence.first_token_at) * 1e3
        sequence.sink(Output(text, drawn, finish))
        if finish is not None:
            self._end(sequence, finish)

    def _end(self, sequence: Sequence, finish: Finish, error: str = "") -> None:
        failed = finish in (Finish.CANCELLED, Finish.FAILED)
        if not failed:
            # Before it leaves the running ones: whoever asks for the load meanwhile must find it in one of them.
            self._saving.add(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        self._repairs.pop(sequence, None)
        if failed:
            self.stats.cancelled += 1
            sequence.sink(Output(finish=finish, error=error))
        else:
            self.stats.requests += 1
            self.stats.prompt_tokens += sequence.prompt_tokens
            self.stats.cached_tokens += sequence.cached_tokens
            self.stats.approximate_tokens += sequence.approximate_tokens
            self.stats.recomputed_tokens += sequence.recomputed_tokens
            self.stats.generated_tokens += sequence.generated
            if sequence.cache.write and self._cache.save(sequence, self.pool, self._on_saved):
                sequence.state = State.SAVING
                return
            self._saving.discard(sequence)
        if failed:
            self._free(sequence)
        else:
            self._retire(sequence)
        sequence.state = State.DONE
        if not failed:
            sequence.sink(Output(stored_tokens=sequence.stored.covered))

    def _retire(self, sequence: Sequence) -> None:
        """Keeps what a finished sequence computed, for those that go on from it."""
        table = sequence.table
        assert table is not None
        sequence.table = sequence.gate = None
        if not sequence.cache.write or not sequence.reusable:
            self.pool.free(table)
            return
        self.pool.trim(table, sequence.reusable)
        tokens = as_array(sequence.tokens[: sequence.reusable])
        self._residents.keep(Resident(tokens, table, sequence.cache.tenant_salt, sequence.stored))

    def _free(self, sequence: Sequence) -> None:
        if sequence.gate is not None:
            sequence.gate.wait_done()  # until then the cache's thread writes to the pages
            sequence.gate = None
        if sequence.table is not None:
            self.pool.free(sequence.table)
            sequence.table = None

    # ---- from the cache's thread ----------------------------------------------------------------------------

    def _on_loaded(self, sequence: Sequence, tokens: int) -> None:
        with self._wake:
            self._loaded.append((sequence, tokens))
            self._wake.notify()

    def _on_saved(self, sequence: Sequence, stored_tokens: int) -> None:
        with self._wake:
            self._saved.append((sequence, stored_tokens))
            self._wake.notify()
