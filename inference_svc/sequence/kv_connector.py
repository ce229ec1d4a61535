"""KV connector: the engine's interface to a cache, and its results and callbacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from inference_svc.context_reuse.reuse_plan import ReusePlan
from inference_svc.context_reuse.reuse_policy import RecomputeSetting
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.model_runner.layerwise_load import LayerReadyEvent
from inference_svc.sequence.sequence import Sequence


@dataclass(frozen=True)
class LoadResult:
    """Loaded part of a prompt, reported once the engine may continue. Times in milliseconds.

    ``tokens`` leading tokens are in the sequence's pages, except those behind the window of layers that have one. With
    ``gate``, deeper layers follow. ``table`` replaces the sequence's table where its pages now hold other tokens. A
    ``plan``, carried out by the selector of ``repair``, describes tokens that were computed in another context.
    """

    tokens: int = 0
    gate: LayerReadyEvent | None = None
    plan: ReusePlan | None = None
    repair: RecomputeSetting | None = None
    stored: StoredPrefix | None = None  # of the prompt; None if unknown
    table: BlockTable | None = None
    lookup_ms: float = 0.0
    transfer_ms: float = 0.0
    looked_up_at: float = 0.0  # end of the lookup (time.perf_counter); 0 without one
    restore_ms: float = 0.0  # until this result; ``gate`` measures the rest


class LoadCallback(Protocol):
    """Receives the result of ``KVConnector.load``."""

    def __call__(self, sequence: Sequence, restored: LoadResult) -> object: ...


class SaveCallback(Protocol):
    """Receives the stored prefix after a save; None when it failed."""

    def __call__(self, sequence: Sequence, stored: StoredPrefix | None) -> object: ...


class ProbeCallback(Protocol):
    """Receives the matched tokens of a probe."""

    def __call__(self, sequence: Sequence, tokens: int) -> object: ...


class KVConnector(Protocol):
    """Loads and stores sequences asynchronously.

    Calls return at once and do not change the sequence. Each callback is called once, on another thread, or within
    ``forget`` for a load that it gives up. Between ``load`` or ``save`` and its callback the connector owns the
    sequence's pages; with a ``gate``, it owns the loaded ones until the gate is done.
    """

    def load(self, sequence: Sequence, pool: KVPool, done: LoadCallback) -> bool:
        """Starts loading stored tokens behind the computed ones. False when there is nothing to load."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Gives up the load of a cancelled or aborted sequence. Its callback is called at once, or as soon as no thread
        writes to its pages. No effect on other sequences."""
        ...

    def load_seconds(self, tokens: int) -> float:
        """Returns the expected seconds to load ``tokens`` tokens; 0 while unknown."""
        ...

    def discard(self, sequence: Sequence, position: int) -> None:
        """Deletes the chunk at a position of a sequence's prompt, asynchronously: its payload is not finite."""
        ...

    def probe(self, sequence: Sequence, done: ProbeCallback) -> None:
        """Looks up asynchronously how many leading tokens of a waiting sequence are stored."""
        ...

    def save(self, sequence: Sequence, pool: KVPool, done: SaveCallback) -> bool:
        """Starts storing the sequence's pages. False when there is nothing to store."""
        ...

    def save_part(self, sequence: Sequence, pool: KVPool, table: BlockTable, tokens: int, done: SaveCallback) -> bool:
        """Starts storing the whole chunks among the first ``tokens`` tokens of a running sequence.

        ``table`` holds their pages until the callback, so the sequence may end meanwhile. False without storage."""
        ...


class NullKVConnector:
    """Connector without a daemon: only the pool's prefix cache is reused."""

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
