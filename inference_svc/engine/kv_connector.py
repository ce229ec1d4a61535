"""What the engine needs of a cache: the one neighbour it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from inference_svc.context_reuse.reuse_plan import ReusePlan
from inference_svc.context_reuse.reuse_policy import RecomputeSetting
from inference_svc.engine.sequence import Sequence, StoredPrefix
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.layerwise_load import LayerReadyEvent


@dataclass(frozen=True)
class LoadResult:
    """What the cache found of a prompt, handed over when the engine may go on. Times in milliseconds.

    ``tokens`` leading tokens are in the sequence's pages, or behind the window of layers that have one; with a
    ``gate``, the layers that it has opened. ``table`` has the same pages, where they stand for other tokens now. A
    ``plan``, carried out by ``repair``, where more was found that had been read in another context.
    """

    tokens: int = 0
    gate: LayerReadyEvent | None = None
    plan: ReusePlan | None = None
    repair: RecomputeSetting | None = None
    stored: StoredPrefix | None = None  # what the cache holds of the prompt; None when it did not say
    table: BlockTable | None = None
    lookup_ms: float = 0.0
    transfer_ms: float = 0.0
    looked_up_at: float = 0.0  # when the look-up was over (time.perf_counter); 0 where there was none
    restore_ms: float = 0.0  # up to the hand-over; what comes after is the gate's


class LoadCallback(Protocol):
    def __call__(self, sequence: Sequence, restored: LoadResult) -> object: ...


class SaveCallback(Protocol):
    def __call__(self, sequence: Sequence, stored: StoredPrefix | None) -> object: ...


class ProbeCallback(Protocol):
    def __call__(self, sequence: Sequence, tokens: int) -> object: ...


class KVConnector(Protocol):
    """The calls return at once and leave the sequence as it is; the callbacks come once each, on another thread, or of
    what ``forget`` gives up within that call.

    Between ``load`` and its callback, and between ``save`` and its callback, the sequence's pages belong to the cache;
    with a gate, the pages of what is restored do until it is done.
    """

    def load(self, sequence: Sequence, pool: KVPool, done: LoadCallback) -> bool:
        """Begins to fill the sequence's pages behind its computed tokens with what is stored; False when there is
        nothing to try."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Gives up loading a sequence that was cancelled or refused: the callback comes at once, or as soon as nobody
        writes to its pages. Without effect on others."""
        ...

    def load_seconds(self, tokens: int) -> float:
        """Seconds that loading so many tokens is expected to take; 0 as long as nothing is known."""
        ...

    def discard(self, sequence: Sequence, position: int) -> None:
        """Deletes the chunk that a sequence's prompt has at a position, at leisure: what was loaded from it is not
        finite."""
        ...

    def probe(self, sequence: Sequence, done: ProbeCallback) -> None:
        """Finds out, at its leisure, how many leading tokens of a sequence that waits are stored."""
        ...

    def save(self, sequence: Sequence, pool: KVPool, done: SaveCallback) -> bool:
        """Begins to store the sequence's pages; False when there is nothing to store. The callback gets what is stored
        then, None when that failed."""
        ...

    def save_part(self, sequence: Sequence, pool: KVPool, table: BlockTable, tokens: int, done: SaveCallback) -> bool:
        """Begins to store what of the first ``tokens`` tokens of a running sequence are whole chunks. ``table`` holds
        their pages until the callback, which is as ``save``'s; so the sequence may end meanwhile. False when nothing is
        stored at all."""
        ...


class NullKVConnector:
    """No daemon: only what the pool still holds is reused."""

    def load(self, sequence: Sequence, pool: KVPool, done: LoadCallback) -> bool:
        return False

    def forget(self, sequence: Sequence) -> None:
        pass

    def load_seconds(self, tokens: int) -> float:
        return 0.0

    def discard(self, sequence: Sequence, position: int) -> None:
        pass

    def probe(self, sequence: Sequence, done: ProbeCallback) -> None:
        pass

    def save(self, sequence: Sequence, pool: KVPool, done: SaveCallback) -> bool:
        return False

    def save_part(self, sequence: Sequence, pool: KVPool, table: BlockTable, tokens: int, done: SaveCallback) -> bool:
        return False
