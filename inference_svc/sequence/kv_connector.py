"""KV connector: the engine's interface to a cache, with results and callbacks."""

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

MISS_UNAVAILABLE, MISS_LOAD_SLOWER, MISS_REPAIR_SLOWER = "unavailable", "load_slower", "repair_slower"
"""Kinds of misses of a connector: no session; loading, or loading with repair, would take longer than prefill."""


@dataclass(frozen=True)
class LoadResult:
    """Loaded part of a prompt. Times are in milliseconds.

    The connector reports the result as soon as the engine may compute the sequence. The first ``tokens`` tokens are in
    the sequence's blocks; in layers with a sliding window, only the last of them are. With a ``gate``, deeper layers
    are still being loaded. ``table`` replaces the sequence's block table if the load moved its blocks to other tokens.
    ``plan`` describes the tokens whose keys and values were computed in another context. The selector of ``repair``
    chooses which of these tokens to compute again.
    """

    tokens: int = 0
    gate: LayerReadyEvent | None = None
    plan: ReusePlan | None = None
    repair: RecomputeSetting | None = None
    stored: StoredPrefix | None = None  # the prompt's prefix that the daemon stores; None if unknown
    table: BlockTable | None = None
    lookup_ms: float = 0.0
    transfer_ms: float = 0.0
    looked_up_at: float = 0.0  # end of the lookup (time.perf_counter); 0 without a lookup
    restore_ms: float = 0.0  # load time until this report; ``gate`` measures the load time after it


class LoadCallback(Protocol):
    """Receives the result of ``KVConnector.load``."""

    def __call__(self, sequence: Sequence, restored: LoadResult) -> object: ...


class SaveCallback(Protocol):
    """Receives the stored prefix after a save; None if the save failed."""

    def __call__(self, sequence: Sequence, stored: StoredPrefix | None) -> object: ...


class ProbeCallback(Protocol):
    """Receives the number of matched tokens of a probe."""

    def __call__(self, sequence: Sequence, tokens: int) -> object: ...


class KVConnector(Protocol):
    """Loads and stores sequences asynchronously.

    Methods return at once and do not change the sequence. The connector calls each callback once, on another thread.
    For an abandoned load, ``forget`` may call the callback on the caller's thread. From ``load`` or ``save`` until the
    callback, the connector owns the sequence's blocks. With a ``gate``, it owns the blocks of loaded tokens until the
    gate is done.
    """

    def load(self, sequence: Sequence, pool: KVPool, done: LoadCallback) -> bool:
        """Starts to load the stored tokens behind the computed ones. False if there is nothing to load."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Abandons the load of a cancelled or aborted sequence.

        The callback is called at once, or as soon as no thread writes to the sequence's blocks. A sequence without a
        load is ignored.
        """
        ...

    def load_seconds(self, tokens: int) -> float:
        """Returns the expected seconds to load ``tokens`` tokens; 0 while unknown."""
        ...

    def discard(self, sequence: Sequence, position: int) -> None:
        """Deletes the chunk at a position of a sequence's prompt. Asynchronous.

        The engine calls it if the chunk's keys or values are not finite.
        """
        ...

    def probe(self, sequence: Sequence, done: ProbeCallback) -> None:
        """Starts a lookup of the number of stored leading tokens of a waiting sequence."""
        ...

    def save(self, sequence: Sequence, pool: KVPool, done: SaveCallback) -> bool:
        """Starts to store the sequence's tokens. False if there is nothing to store."""
        ...

    def save_part(self, sequence: Sequence, pool: KVPool, table: BlockTable, tokens: int, done: SaveCallback) -> bool:
        """Starts to store the whole chunks of the first ``tokens`` tokens of a running sequence.

        ``table`` has references to their blocks until the callback, so the sequence may end earlier. False if nothing
        can be stored.
        """
        ...


class NullKVConnector:
    """Connector without a daemon: only the pool's prefix cache is used."""

    def load(self, sequence: Sequence, pool: KVPool, done: LoadCallback) -> bool:
        sequence.set_miss(MISS_UNAVAILABLE)
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
