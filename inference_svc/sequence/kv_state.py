"""KV state of one sequence: block table, progress, pending layers, stored prefix."""

from __future__ import annotations

from inference_svc.context_reuse.reuse_plan import ReusePlan
from inference_svc.context_reuse.reuse_policy import RecomputeSetting
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.model_runner.layerwise_load import LayerReadyEvent


class KVState:
    """Location and progress of a sequence's keys and values.

    Only the engine's thread changes the state, and only with these methods. A thread that loads or stores the
    sequence's blocks may read ``table``, ``num_computed`` and ``stored``.
    """

    __slots__ = (
        "is_corrupt",
        "layers",
        "load_failed",
        "num_computed",
        "num_reused",
        "offered",
        "plan",
        "recompute",
        "stored",
        "table",
    )

    def __init__(self) -> None:
        self.table: BlockTable | None = None
        self.num_computed = 0  # leading tokens whose keys and values are in the pool
        self.num_reused = 0  # leading tokens that came from the pool or the cache at the last start
        self.layers: LayerReadyEvent | None = None  # set if deeper layers are loaded while the sequence runs
        self.plan: ReusePlan | None = None  # set if the prompt has approximate parts
        self.recompute: RecomputeSetting | None = None  # the selector for ``plan``
        self.stored = StoredPrefix()
        self.offered = 0  # tokens that the connector got for partial saves
        self.load_failed = False  # loading the cached prefix failed: the sequence must not use the cache
        self.is_corrupt = False  # the cached prefix was not finite

    @property
    def is_full(self) -> bool:
        """True if the blocks have no slot for another token."""
        return self.table is not None and self.table.tokens == self.num_computed

    @property
    def is_loading(self) -> bool:
        """True while layers are being loaded: a step with this sequence may have to wait for them."""
        return self.layers is not None and not self.layers.done

    @property
    def is_loaded(self) -> bool:
        """True if all layers are in the pool: no layer is still loading, and no layer failed to load."""
        return self.layers is None or self.layers.complete

    @property
    def num_exact(self) -> int:
        """Leading tokens whose keys and values equal those of a full prefill; other sequences may reuse only these."""
        return self.num_computed if self.plan is None else min(self.num_computed, self.plan.exact)

    def attach(self, table: BlockTable) -> None:
        """Takes ownership of a table's blocks. The sequence frees them, even if its admission fails later."""
        self.table = table

    def reuse_prefix(self, num_tokens: int, stored: StoredPrefix | None) -> None:
        """Records ``num_tokens`` leading tokens that were copied or shared from the pool."""
        self.num_computed = num_tokens
        if stored is not None and stored.tokens <= num_tokens:
            self.stored = StoredPrefix(stored.tokens, stored.prefix_hash, min(stored.covered, num_tokens))

    def load(self, num_tokens: int, table: BlockTable | None, stored: StoredPrefix | None) -> None:
        """Records a load of ``num_tokens`` leading tokens; ``table`` replaces the block table unless it is None."""
        self.table = table or self.table
        self.num_computed = self.num_reused = max(self.num_computed, num_tokens)
        if stored is not None and stored.covered >= self.stored.covered:
            self.stored = stored

    def advance(self, count: int) -> None:
        """Adds ``count`` tokens whose keys and values a step computed."""
        self.num_computed += count

    def offer(self, num_tokens: int) -> None:
        """Records that the connector got the first ``num_tokens`` tokens for a partial save."""
        self.offered = num_tokens

    def record_stored(self, stored: StoredPrefix | None) -> None:
        """Records the stored prefix after a save; None (a failed save) changes nothing."""
        if stored is not None:
            self.stored = stored

    def detach(self) -> BlockTable | None:
        """Removes the table; the caller owns its blocks. No thread may still be loading layers."""
        table, self.table, self.layers = self.table, None, None
        return table

    def drop_prefix(self) -> None:
        """Removes a corrupt prefix whose blocks were freed; nothing counts as stored any more."""
        self.table, self.layers, self.stored, self.is_corrupt = None, None, StoredPrefix(), True

    def restart(self) -> None:
        """Resets all progress; the sequence waits again, without blocks."""
        self.num_computed = self.offered = 0
        self.plan = None
