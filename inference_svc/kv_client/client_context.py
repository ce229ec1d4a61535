"""Client context: state and counters that a worker's loader and saver share."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvsidecar.chunk_layout import Geometry
from kvsidecar.kv_transfer.session import CompletedLoad

from inference_svc.context_reuse.reuse_policy import ReusePolicy
from inference_svc.kv_client.load_cost_model import LoadCostModel


@dataclass
class CacheStats:
    """Counters since the start of the worker."""

    failures: int = 0
    bypassed: int = 0  # prompts that were not looked up, because loads were slower than prefill
    stored_chunks: int = 0
    refused_chunks: int = 0
    corrupt_chunks: int = 0  # chunks deleted because their values were not finite
    loaded_bytes: int = 0  # payload bytes copied into the pool
    stored_bytes: int = 0  # payload bytes written for the daemon
    load_seconds: float = 0.0  # lookups and copies of loads
    saved_prefill_seconds: float = 0.0  # estimated prefill of the loaded tokens

    def record_load(self, load: CompletedLoad, saved_prefill_seconds: float) -> None:
        """Count a load."""
        self.loaded_bytes += load.payload_bytes
        self.load_seconds += load.seconds
        self.saved_prefill_seconds += saved_prefill_seconds


@dataclass(frozen=True)
class ClientContext:
    """One worker's chunk geometry, reuse policy, cost model and counters.

    ``projection_share`` is the share of the query, key and value projections in a layer's weights. ``timeout_seconds``
    limits a call that transfers no payload.
    """

    geometry: Geometry
    policy: ReusePolicy
    projection_share: float
    timeout_seconds: float
    cost_model: LoadCostModel = field(default_factory=LoadCostModel)
    stats: CacheStats = field(default_factory=CacheStats)
