"""State that loader and saver of one worker share, and their counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvsidecar.chunk_layout import Geometry

from inference_svc.context_reuse.reuse_policy import ReusePolicy
from inference_svc.kv_client.load_cost_model import LoadCostModel


@dataclass
class CacheStats:
    """Counters since the start of the worker."""

    failures: int = 0
    bypassed: int = 0  # prompts that were not looked up, because loads had been slower than prefill
    stored_chunks: int = 0
    refused_chunks: int = 0
    corrupt_chunks: int = 0  # deleted, because values loaded from them were not finite
    loaded_bytes: int = 0  # of payloads that were copied into the pool


@dataclass(frozen=True)
class ClientContext:
    """One worker's chunk geometry, reuse policy, cost model and counters.

    ``projection_share`` is the share of a layer's weights that queries, keys and values take. ``timeout_seconds``
    bounds a call that transfers no payload.
    """

    geometry: Geometry
    policy: ReusePolicy
    projection_share: float
    timeout_seconds: float
    cost_model: LoadCostModel = field(default_factory=LoadCostModel)
    stats: CacheStats = field(default_factory=CacheStats)
