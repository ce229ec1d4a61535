"""The engine: one thread that batches rows of all running sequences, step by step.

Loading from and storing to the cache happen on the cache's own thread; a sequence's pages belong to that thread
meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import Future
from typing import TypeVar

import structlog
import torch
from kvsidecar.errors import ModelUnsupported, Overloaded, Unavailable, UnknownModel

from inference_svc.engine import rows
from inference_svc.engine.cache_port import Cache
from inference_svc.engine.decode_graphs import decode_graphs
from inference_svc.engine.forward import Decoder
from inference_svc.engine.loop import Loop
from inference_svc.engine.mailbox import CancelAsked, Letter, Mailbox, Submitted, Task
from inference_svc.engine.pool import KVPool
from inference_svc.engine.residents import Resident
from inference_svc.engine.room import Room
from inference_svc.engine.sequence import Sequence
from inference_svc.engine.speculation.calibration import once, timed
from inference_svc.engine.speculation.costs import Costs
from inference_svc.engine.speculation.draft_model import DraftModel
from inference_svc.engine.speculation.lookup import Lookup
from inference_svc.engine.speculation.mode import Speculation
from inference_svc.engine.speculation.proposer import Proposer
from inference_svc.engine.speculation.speculator import Speculator
from inference_svc.engine.stats import EngineLimits, EngineStats
from inference_svc.lora.adapter import Adapter
from inference_svc.lora.weights import AdapterWeights
from inference_svc.model.loader import LoadedModel

log = structlog.get_logger("engine")
T = TypeVar("T")


class Engine:
    """Runs sequences. ``submit`` and ``cancel`` may be called from any thread; all else is the engine's own."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: KVPool,
        cache: Cache,
        limits: EngineLimits | None = None,
        threads: int = 0,
        draft: DraftModel | None = None,
        speculates: bool = False,
        adapters: Many[AdapterWeights] = (),
        decoder: Decoder | None = None,
    ) -> None:
        """``adapters`` are placed beside the model. ``draft`` guesses for those who ask for it. With ``speculates``,
        what passes cost is measured before the first request, not with them. ``decoder`` is the model's, if it has
        one. Raises ModelUnsupported when the first forward fails."""
        self.loaded, self.pool, self.stats = loaded, pool, EngineStats()
        self.decoder = decoder or Decoder(loaded)
        # Only the engine's thread changes it; others copy it before they walk over it.
        self.adapters = {weights.name: self.decoder.adopt(weights) for weights in adapters}
        self._limits = limits or EngineLimits()
        graphs = decode_graphs(self.decoder, pool, self._limits.batch_sequences)
        self._recorded = graphs is not None
        proposers: dict[Speculation, Proposer] = {Speculation.NGRAM: Lookup()}
        if draft is not None:
            proposers[Speculation.DRAFT] = draft
        self._draft, self._speculates = draft, speculates
        limits = self._limits
        self.speculator = Speculator(proposers, Costs(self._recorded), limits.draft_tokens, limits.draft_branches)
        self._mail = Mailbox()
        self._loop = Loop(
            self.decoder,
            pool,
            cache,
            self._limits,
            self.context_length,
            graphs,
            self.speculator,
            self.stats,
            self._mail.post,
        )
        self._free_pages, self._free_overflow_pages = pool.pages, pool.overflow_pages
        self._stepping = threading.Lock()
        self._threads = threads
        self._ready = threading.Event()
        self._broken: Exception | None = None
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
        """Most tokens of prompt and answer together: the model's, or the pool's if that is less."""
        return self.room.longest

    @property
    def room(self) -> Room:
        """What a prompt and its answer may have."""
        return Room.of(self.pool, self._limits.batch_tokens, self.loaded.context_length)

    def submit(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises PromptTooLong, PromptExceedsPool, Overloaded, Unavailable."""
        self.room.check(sequence.prompt_tokens)
        if self._mail.submitted + len(self._loop.waiting) >= self._limits.waiting:
            raise Overloaded(f"{self._limits.waiting} requests wait already; try again later")
        if not self._mail.post(Submitted(sequence)):
            raise Unavailable("the worker is shutting down; send the request to another one")

    def cancel(self, sequence: Sequence) -> None:
        """Ends a sequence at the next step; its pages are free then. Idempotent."""
        sequence.cancelled.set()
        self._mail.post(CancelAsked(sequence))

    def adopt(self, weights: AdapterWeights) -> Adapter:
        """Places an adapter, which no other has the name of, beside the model; requests go on. Blocks, and raises
        Unavailable, or what its first forward does: nobody may name it then."""
        adapter = self.decoder.place(weights)

        def let_in() -> Adapter:
            self.decoder.let_in(adapter)
            self._run_rows(1, 0, adapter)
            self.adapters[adapter.name] = adapter
            return adapter

        return self.between_steps(let_in)

    def drop(self, name: str) -> Adapter:
        """Ends an adapter, and its requests. Blocks. Raises UnknownModel, Unavailable."""

        def end() -> Adapter:
            adapter = self.adapters.pop(name, None)
            if adapter is None:
                raise UnknownModel(f"there is no adapter {name[:100]!r}", param="name")
            self._loop.end_all(adapter, _gone(adapter))
            return adapter

        return self.between_steps(end)

    def between_steps(self, work: Callable[[], T]) -> T:
        """What the engine's thread makes of something that no forward may run beside. Raises what it raises."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)

        if not self._mail.post(Task(run)):
            raise Unavailable("the worker is shutting down; try again on another one")
        return done.result()

    @property
    def load(self) -> tuple[int, int, int]:
        """Sequences running, waiting, being saved."""
        loop = self._loop
        waiting = self._mail.submitted + len(loop.waiting) + len(loop.leaving.sequences)
        return len(loop.running) + len(loop.loading), waiting, len(loop.saving) + loop.passing.orphans

    def stop(self) -> None:
        """Ends the thread after the current step; unfinished sequences fail. Blocks."""
        self._mail.close()
        self._thread.join()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is held by live sequences and residents only."""
        with self._stepping:
            self.pool.check_integrity()
            tables = self._loop.tables() + self._loop.residents.tables
            assert self.pool.held_by(tables), "pages are held by nobody, or by more than are counted"
            if self._draft is not None:
                held = tables if self._draft.copies else self._draft.tables()
                assert self._draft.pool.held_by(held), "the draft holds pages of nobody"

    @property
    def free_pages(self) -> int:
        """Pages that a new sequence could have, as of the last step: free, or only kept for reuse."""
        return self._free_pages

    @property
    def free_overflow_pages(self) -> int:
        """The same of the pool's overflow."""
        return self._free_overflow_pages

    @property
    def resident_sequences(self) -> int:
        """Finished sequences that are kept for reuse."""
        return len(self._loop.residents)

    def resident(self, number: int) -> Resident:
        """One of them, the least recently used first. Call it when idle."""
        with self._stepping:
            return self._loop.residents.held[number]

    # ---- the engine's thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self._threads:
                torch.set_num_threads(self._threads)
            self._warm_up()
        except Exception as error:
            self._broken = error
            return
        finally:
            self._ready.set()
        while self._mail.wait(lambda: self._loop.busy):
            with self._stepping:
                try:
                    self._mail.take(self._read)
                    self._loop.step()
                except Exception as error:
                    log.exception("step failed")
                    self._loop.fail_all(error)
                self._free_pages = self._loop.count_free()
                self._free_overflow_pages = self._loop.count_free_overflow()
        self._mail.take(self._loop.read)
        self._loop.shut_down()

    def _read(self, letter: Letter) -> None:
        self._loop.read(letter)
        adapter = letter.sequence.adapter if isinstance(letter, Submitted) else None
        if adapter is not None and self.adapters.get(adapter.name) is not adapter:
            self._loop.end_all(adapter, _gone(adapter))  # it went while the prompt was being read

    def _warm_up(self) -> None:
        """Runs every kernel once, so that none is compiled while a request waits."""
        for count in (1, 64):
            self._run_rows(count, 0)
        for adapter in self.adapters.values():
            self._run_rows(1, 0, adapter)
        if self._speculates:
            # One row is a recorded pass where there are such, and has a price of its own.
            drafted = timed(lambda count: self._run_rows(count, count - 1), least=2 if self._recorded else 1)
            self._run_rows(1, 0)
            self.speculator.costs.calibrate(drafted, once(lambda count: self._run_rows(count, 0), 1))

    def _run_rows(self, count: int, drafted: int, adapter: Adapter | None = None) -> None:
        """Computes so many rows of a sequence that is nobody's, as a step does; nothing when the pool is too small."""
        table = self.pool.allocate(count)
        if table is not None:
            logits = self._loop.compute([rows.Span([0] * count, 0, table, True, drafted=drafted, adapter=adapter)])
            logits[0, 0].item()  # a device works on by itself
            self.pool.free(table)


def _gone(adapter: Adapter) -> UnknownModel:
    return UnknownModel(f"the adapter {adapter.name!r} has been unloaded", param="model")
