"""Keys and values of one sequence: block table, progress, pending layers, stored prefix."""

from __future__ import annotations

from inference_svc.context_reuse.reuse_plan import ReusePlan
from inference_svc.context_reuse.reuse_policy import RecomputeSetting
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.model_runner.layerwise_load import LayerReadyEvent


class KVState:
    """Location and progress of a sequence's keys and values.

    Only the engine's thread changes it, and only by these methods. While another thread loads or stores the pages, it
    may read ``table``, ``num_computed`` and ``stored``.
    """

    __slots__ = (
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
        self.num_reused = 0  # leading tokens that the pool or the cache had at the last start
        self.layers: LayerReadyEvent | None = None  # while deeper layers are still being loaded
        self.plan: ReusePlan | None = None  # with approximate parts of the prompt
        self.recompute: RecomputeSetting | None = None  # the selector for such a plan
        self.stored = StoredPrefix()
        self.offered = 0  # tokens that were given to the connector while the sequence ran
        self.load_failed = False  # the cached prefix could not be loaded: computed without the cache

    @property
    def is_loading(self) -> bool:
        """True while layers are still being loaded: a step with this sequence may have to wait."""
        return self.layers is not None and not self.layers.done

    @property
    def is_loaded(self) -> bool:
        """True unless layers are missing, because they are still loading or failed to load."""
        return self.layers is None or self.layers.complete

    @property
    def num_exact(self) -> int:
        """Leading tokens whose keys and values equal a full computation: the prefix that others may reuse."""
        return self.num_computed if self.plan is None else min(self.num_computed, self.plan.exact)

    def attach(self, table: BlockTable) -> None:
        """Takes the pages of a table over; the sequence now frees them, also when admission fails later."""
        self.table = table

    def reuse_prefix(self, num_tokens: int, stored: StoredPrefix | None) -> None:
        """Records that the table begins with ``num_tokens`` copied or shared tokens of a pool prefix."""
        self.num_computed = num_tokens
        if stored is not None and stored.tokens <= num_tokens:
            self.stored = StoredPrefix(stored.tokens, stored.prefix_hash, min(stored.covered, num_tokens))

    def load(self, num_tokens: int, table: BlockTable | None, stored: StoredPrefix | None) -> None:
        """Records a load result: ``num_tokens`` leading tokens, in ``table`` if the connector made another one."""
        self.table = table or self.table
        self.num_computed = self.num_reused = max(self.num_computed, num_tokens)
        if stored is not None and stored.covered >= self.stored.covered:
            self.stored = stored

    def advance(self, count: int) -> None:
        """Counts tokens whose keys and values a step computed."""
        self.num_computed += count

    def offer(self, num_tokens: int) -> None:
        """Records that the first ``num_tokens`` were given to the connector."""
        self.offered = num_tokens

    def record_stored(self, stored: StoredPrefix | None) -> None:
        """Records the stored prefix after a save; None (a failed save) changes nothing."""
        if stored is not None:
            self.stored = stored

    def detach(self) -> BlockTable | None:
        """Gives the table up; the caller owns its pages. No thread may still load layers."""
        table, self.table, self.layers = self.table, None, None
        return table

    def drop_prefix(self) -> None:
        """Gives up a corrupt prefix: freed pages, and nothing counts as stored."""
        self.table, self.layers, self.stored = None, None, StoredPrefix()

    def restart(self) -> None:
        """Forgets all progress: the sequence waits again, without pages."""
        self.num_computed = self.offered = 0
        self.plan = None
