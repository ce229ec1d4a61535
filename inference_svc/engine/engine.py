"""Engine: one thread that computes rows of all running sequences in batches.

The connector's threads load from the cache and store to it. While a thread loads or stores a sequence, that thread owns
the sequence's blocks.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import Future
from typing import TypeVar

import structlog
import torch
from kvsidecar.errors import KVSidecarError, ModelUnsupported, Overloaded, Unavailable, UnknownModel

from inference_svc.engine.engine_core import EngineCore, EngineServices
from inference_svc.engine.engine_events import CancelRequested, EngineEvent, EngineTask, EventQueue, RequestSubmitted
from inference_svc.engine.engine_stats import EngineLimits, EngineStats
from inference_svc.engine.request_lifecycle import emit
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import CachedSequence
from inference_svc.lora.adapter_weights import AdapterWeights
from inference_svc.lora.lora_adapter import LoraAdapter
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.cuda_graphs import make_cuda_graphs
from inference_svc.model_runner.decoder import Decoder
from inference_svc.model_runner.engine_lost import EngineLost, check_device
from inference_svc.models.loader import LoadedModel
from inference_svc.scheduling.context_limits import ContextLimits
from inference_svc.sequence.generation_request import SpeculationMode
from inference_svc.sequence.kv_connector import KVConnector
from inference_svc.sequence.sequence import FinishReason, Sequence, SequenceOutput
from inference_svc.spec_decode.draft_model_proposer import DraftModelProposer
from inference_svc.spec_decode.ngram_proposer import NgramProposer
from inference_svc.spec_decode.proposer import Proposer
from inference_svc.spec_decode.speculator import Speculator
from inference_svc.spec_decode.step_cost_model import StepCostModel, time_once, time_steps

log = structlog.get_logger("engine")
T = TypeVar("T")
# A step counts as hung after _MAX_STEP_SECONDS, or after _MAX_STEP_RATIO times a full batch's expected time if longer.
_MAX_STEP_SECONDS, _MAX_STEP_RATIO = 60.0, 4.0
_WARM_ROWS = 64
# Free blocks, which metrics report, are counted so often while steps run: a count takes a tenth of a small step.
_COUNT_SECONDS = 0.1


class Engine:
    """Runs sequences on its own thread. Any other thread may call the public methods."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KVPool,
        cache: KVConnector,
        limits: EngineLimits | None = None,
        threads: int = 0,
        draft: DraftModelProposer | None = None,
        speculates: bool = False,
        adapters: Many[AdapterWeights] = (),
        decoder: Decoder | None = None,
    ) -> None:
        """Starts the engine's thread and runs a first forward. Raises ModelUnsupported if it fails.

        ``threads``: compute threads, 0 for torch's default. ``draft``: proposer for requests with a draft model.
        ``speculates``: measure the cost of steps before the first request. ``decoder``: the model's decoder, if it
        exists already.
        """
        self.loaded, self.pool, self.stats = loaded, pool, EngineStats()
        self.decoder = decoder or Decoder(loaded)
        # Only the engine's thread changes this dict; other threads copy it before they iterate.
        self.adapters = {weights.name: self.decoder.adopt(weights) for weights in adapters}
        self._limits = limits = limits or EngineLimits()
        graphs = make_cuda_graphs(self.decoder, pool, limits.max_num_seqs)
        self._recorded = graphs is not None
        proposers: dict[SpeculationMode, Proposer] = {SpeculationMode.NGRAM: NgramProposer()}
        if draft is not None:
            proposers[SpeculationMode.DRAFT] = draft
        self._cache, self._draft, self._speculates = cache, draft, speculates
        self.speculator = Speculator(
            proposers, StepCostModel(self._recorded), limits.num_speculative_tokens, limits.num_speculative_branches
        )
        self._events = EventQueue()
        self._core = EngineCore(
            EngineServices(self.decoder, pool, cache, graphs, self.speculator, self.stats),
            self._limits,
            self.context_length,
            self._events.post,
        )
        self._free_pages, self._free_overflow_pages = pool.pages, pool.overflow_pages
        self._stepping = threading.Lock()
        self._threads = threads
        self._ready = threading.Event()
        self._broken: BaseException | None = None
        self._step_began = 0.0  # start of the current step; 0 between steps
        self._count_at = 0.0  # next count of the free blocks
        self._full_batch_seconds = 0.0  # a full batch's time, if every row takes as long as one of the warm-up
        self.died: Future[Unavailable] = Future()
        """Result: the error for further callers. Set after the engine has stopped and open requests have got it."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._broken is not None:
            self._thread.join()
            error = self._broken
            raise ModelUnsupported(
                f"{loaded.id} cannot run here: its first forward failed: {type(error).__name__}: {error}"
            ) from error

    @property
    def context_length(self) -> int:
        """Maximum tokens of prompt and answer together: the lower of the limits of the model and of the pool."""
        return self.context_limits.longest

    @property
    def context_limits(self) -> ContextLimits:
        """Limits of prompt and answer, from the pool and the model's context length."""
        return ContextLimits.of(self.pool, self._limits.max_num_batched_tokens, self.loaded.context_length)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises PromptTooLong, PromptExceedsPool, Overloaded, Unavailable."""
        self.context_limits.check(sequence.request.num_prompt_tokens)
        if self._events.num_pending_requests + len(self._core.waiting) >= self._limits.max_queue:
            raise Overloaded(f"{self._limits.max_queue} requests wait already; try again later")
        if not self._events.post(RequestSubmitted(sequence)):
            raise self._why_not()

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence at the next step, and frees its blocks. Idempotent."""
        sequence.cancelled.set()
        self._events.post(CancelRequested(sequence))

    def adopt(self, weights: AdapterWeights) -> LoraAdapter:
        """Adds an adapter with a new name while requests run. Blocks.

        Raises Unavailable, Overloaded if running requests use all blocks, or the error of the adapter's first forward;
        the adapter is then not added.
        """
        adapter = self.decoder.place(weights)

        def let_in() -> LoraAdapter:
            self.decoder.let_in(adapter)
            if not self._run_rows(1, 0, adapter):
                raise Overloaded("running requests use the whole KV pool; load the adapter again later")
            self.adapters[adapter.name] = adapter
            return adapter

        return self.between_steps(let_in)

    def drop(self, name: str) -> LoraAdapter:
        """Removes an adapter, and ends its requests. Blocks. Raises UnknownModel, Unavailable."""

        def end() -> LoraAdapter:
            adapter = self.adapters.pop(name, None)
            if adapter is None:
                raise UnknownModel(f"there is no adapter {name[:100]!r}", param="name")
            self._end_all(adapter, _gone(adapter))
            return adapter

        return self.between_steps(end)

    def between_steps(self, work: Callable[[], T]) -> T:
        """Runs ``work`` on the engine's thread between two steps. Returns its result, or raises its error."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)
            except BaseException as error:
                done.set_exception(Unavailable(f"the engine ended: {error}"))
                raise

        if not self._events.post(EngineTask(run, done.set_exception)):
            raise self._why_not()
        return done.result()

    def end(self, reason: str) -> None:
        """Ends the engine between two steps, in the same way as a failure of the device."""

        def lose() -> None:
            raise EngineLost(reason)

        self._events.post(EngineTask(lose, lambda _: None))

    def _why_not(self) -> Unavailable:
        """Returns the error for a caller whose sequence or task the engine can no longer accept."""
        return self.died.result() if self.died.done() else _shutting_down()

    @property
    def ailment(self) -> str:
        """Reason why the engine computes nothing: it has stopped, or a step hangs. Empty if it works.

        Any thread may read it.
        """
        if self.died.done():
            return str(self.died.result())
        began = self._step_began
        seconds = time.perf_counter() - began if began else 0.0
        if seconds <= self.max_step_seconds:
            return ""
        return f"a step of the engine has taken {seconds:.0f} s; at most {self.max_step_seconds:.0f} s are expected"

    @property
    def max_step_seconds(self) -> float:
        """Seconds after which a step counts as hung: a minute, or more if a full batch takes long."""
        full = self._core.prefill_budget.seconds(self._limits.max_num_batched_tokens) or self._full_batch_seconds
        return max(_MAX_STEP_SECONDS, _MAX_STEP_RATIO * full)

    @property
    def load(self) -> tuple[int, int, int]:
        """Number of sequences that are running, waiting, and being saved."""
        core = self._core
        waiting = self._events.num_pending_requests + len(core.waiting) + len(core.preempted_kv_saver.sequences)
        return len(core.running) + len(core.loading), waiting, len(core.saving) + core.window_releaser.num_orphans

    def stop(self) -> None:
        """Ends the thread after the current step; unfinished sequences fail. Blocks."""
        self._events.close()
        self._thread.join()

    def check_integrity(self) -> None:
        """Raises AssertionError unless all blocks in use belong to live sequences or the prefix cache."""
        with self._stepping:
            self.pool.check_integrity()
            tables = self._core.tables() + self._core.prefix_cache.tables
            assert self.pool.references_match(tables), "pages are held by nobody, or by more than are counted"
            if self._draft is not None:
                held = tables if self._draft.copies else self._draft.tables()
                assert self._draft.pool.references_match(held), "the draft holds pages of nobody"

    @property
    def free_pages(self) -> int:
        """Number of blocks that are free, or only in the prefix cache; counted up to 0.1 s ago while steps run."""
        return self._free_pages

    @property
    def free_overflow_pages(self) -> int:
        """Number of overflow blocks that are free, or only in the prefix cache; counted like ``free_pages``."""
        return self._free_overflow_pages

    @property
    def resident_sequences(self) -> int:
        """Number of sequences in the prefix cache."""
        return len(self._core.prefix_cache)

    def resident(self, number: int) -> CachedSequence:
        """Returns an entry of the prefix cache; number 0 is the least recently used. For an idle engine."""
        with self._stepping:
            return self._core.prefix_cache.entries[number]

    # ---- the engine's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._threads:
                torch.set_num_threads(self._threads)
            self._warm_up()
        except BaseException as error:
            self._broken = error
            return
        finally:
            self._ready.set()
        try:
            while self._events.wait(lambda: self._core.busy, self._core.admission.wake_at):
                with self._stepping:
                    self._step()
            self._events.drain(self._core.handle)
            self._tell_all(_shutting_down())
        except BaseException as error:
            self._die(error)

    def _step(self) -> None:
        """Handles events and runs a step. An error that it raises ends the engine."""
        self._step_began = time.perf_counter()
        try:
            self._events.drain(self._read)
            self._core.step()
        except Exception as error:
            log.exception("step failed")
            check_device(self.loaded.device, error)
            # The step may have left any of these sequences in an undefined state, so all of them end.
            for sequence in [*self._core.running, *self._core.waiting]:
                self._core.fail(sequence, error)
        self._count_free_pages()
        self._step_began = 0.0

    def _count_free_pages(self) -> None:
        """Counts the free blocks, for metrics. While steps follow each other, only now and then."""
        now = time.perf_counter()
        if now < self._count_at and self._core.busy:
            return
        self._count_at = now + _COUNT_SECONDS
        self._free_pages = self._core.count_free_pages()
        self._free_overflow_pages = self._core.count_free_overflow_pages()

    def _die(self, error: BaseException) -> None:
        """Reports to all callers that the engine has stopped. Does not use the pool or the device."""
        told = Unavailable(
            f"the engine has stopped: {type(error).__name__}: {error}; send the request to another worker, or start a "
            "new one"
        )
        log.error("the engine has stopped", error=str(error), exc_info=error)
        self._events.close()
        self._events.drain(lambda event: self._bounce(event, told))
        self._tell_all(told)
        self.died.set_result(told)

    def _tell_all(self, error: Unavailable) -> None:
        """Ends all unfinished sequences with ``error``, so that their callers may use another worker.

        Computes nothing and frees no blocks.
        """
        core = self._core
        for sequence in [*core.waiting, *core.running, *core.loading, *core.preempted_kv_saver.sequences]:
            sequence.queue.abort_error = error  # the connector stops loading it
            emit(sequence, SequenceOutput(finish=FinishReason.FAILED, error=error))
        for sequence in list(core.saving):  # the answer is complete; only the result of its save is missing
            emit(sequence, SequenceOutput(error=error))

    @staticmethod
    def _bounce(event: EngineEvent, error: Unavailable) -> None:
        match event:
            case RequestSubmitted(sequence):
                emit(sequence, SequenceOutput(finish=FinishReason.FAILED, error=error))
            case EngineTask(_, fail):
                fail(error)

    def _read(self, event: EngineEvent) -> None:
        self._core.handle(event)
        adapter = event.sequence.request.adapter if isinstance(event, RequestSubmitted) else None
        if adapter is not None and self.adapters.get(adapter.name) is not adapter:
            self._end_all(adapter, _gone(adapter))  # the adapter was unloaded while the request was being prepared

    def _end_all(self, adapter: LoraAdapter, error: KVSidecarError) -> None:
        """Ends all unfinished sequences of an adapter."""
        core = self._core
        for sequence in [s for s in (*core.running, *core.waiting) if s.request.adapter is adapter]:
            core.fail(sequence, error)
        for sequence in [
            s for s in (*core.loading, *core.preempted_kv_saver.sequences) if s.request.adapter is adapter
        ]:
            sequence.queue.abort_error = error
            self._cache.forget(sequence)

    def _warm_up(self) -> None:
        """Runs every kernel once, so that no kernel is compiled while a request waits. Measures step costs."""
        for count in (1, _WARM_ROWS):
            seconds = time_once(lambda count: self._run_rows(count, 0), count)
        self._full_batch_seconds = seconds / _WARM_ROWS * self._limits.max_num_batched_tokens
        if self.loaded.streamed is None:  # reading streamed weights takes the same time for any number of rows
            self._core.prefill_budget.learn(0, time_once(lambda count: self._run_rows(count, 0), 1))
            self._core.prefill_budget.learn(_WARM_ROWS, seconds)
        for adapter in self.adapters.values():
            self._run_rows(1, 0, adapter)
        if self._speculates:
            # With CUDA graphs, a step of one row is recorded and has a separate cost.
            drafted = time_steps(lambda count: self._run_rows(count, count - 1), min_rows=2 if self._recorded else 1)
            self._run_rows(1, 0)
            self.speculator.costs.calibrate(drafted, time_once(lambda count: self._run_rows(count, 0), 1))

    def _run_rows(self, count: int, drafted: int, adapter: LoraAdapter | None = None) -> bool:
        """Computes ``count`` rows of a dummy sequence like a step. False if the pool is too full for them."""
        table = self._core.prefix_cache.allocate(count)
        if table is None:
            return False
        try:
            logits = self._core.compute(
                [forward_batch.SequenceSlice([0] * count, 0, table, True, num_drafted=drafted, adapter=adapter)]
            )
            is_finite = math.isfinite(logits[0, 0].item())  # waits for the device, which computes asynchronously
        except Exception as error:
            check_device(self.loaded.device, error)
            self._free_zeroed(table)
            raise
        if is_finite:
            self.pool.free(table)
        else:
            self._free_zeroed(table)
        return True

    def _free_zeroed(self, table: BlockTable) -> None:
        """Frees blocks that may hold NaN or infinity."""
        self.pool.zero_exclusive(table)
        self.pool.free(table)


def _shutting_down() -> Unavailable:
    return Unavailable("the worker is shutting down; send the request to another one")


def _gone(adapter: LoraAdapter) -> UnknownModel:
    return UnknownModel(f"the adapter {adapter.name!r} has been unloaded", param="model")
