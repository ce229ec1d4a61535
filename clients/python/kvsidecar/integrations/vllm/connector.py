"""The KV connector class that vLLM loads.

The class forwards vLLM's calls to the scheduler connector or the worker connector. It imports these two only when they
are needed. The reason: vLLM imports this module during configuration, our kernels import llvmlite, and vLLM 0.32 cannot
start its CPU kernels in a process that has already imported llvmlite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvsidecar.integrations.vllm.config_check import check_config
from kvsidecar.integrations.vllm.connector_settings import read_settings
from kvsidecar.integrations.vllm.step_metadata import StepJobs, WorkerHandshake

if TYPE_CHECKING:
    from kvsidecar.integrations.vllm.scheduler_connector import SchedulerConnector
    from kvsidecar.integrations.vllm.worker_connector import WorkerConnector


@dataclass
class StepMetadata(KVConnectorMetadata):
    """A step's jobs, wrapped in the class that vLLM passes from the scheduler to workers."""

    step: StepJobs


@dataclass
class HandshakeMetadata(KVConnectorHandshakeMetadata):
    """A worker's handshake, wrapped in the class that vLLM passes from workers to the scheduler."""

    handshake: WorkerHandshake


class KVSidecarConnector(KVConnectorBase_V1):
    """KVSidecar's connector for vLLM; see ``docs/engines.md``.

    The constructor and ``register_kv_caches`` raise ConfigurationError for unsupported configurations.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = read_settings(self._kv_transfer_config.kv_connector_extra_config or {})
        check_config(vllm_config, kv_cache_config)
        self._block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        # A failed load must not fail the request. This change takes effect, because the scheduler reads the setting
        # only after it has created the connector.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self._scheduler: SchedulerConnector | None = None
        self._worker: WorkerConnector | None = None
        if role is KVConnectorRole.SCHEDULER:
            from kvsidecar.integrations.vllm.scheduler_connector import SchedulerConnector

            self._scheduler = SchedulerConnector(
                self._settings,
                self._block_tokens,
                kv_cache_config.num_blocks,
                loads=self._kv_transfer_config.is_kv_consumer,
                stores=self._kv_transfer_config.is_kv_producer,
                shares=bool(vllm_config.cache_config.enable_prefix_caching),
            )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a block that is not stored costs only its recompute

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
        self._scheduler = self._worker = None

    # ---- worker side ----------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        from kvsidecar.integrations.vllm.worker_startup import start_worker

        self._worker = start_worker(self._settings, self._vllm_config, self._kv_cache_config, kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self._worker is None else HandshakeMetadata(self._worker.handshake())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is not None:
            assert isinstance(kv_connector_metadata, StepMetadata)
            self._worker.handle_preemptions(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_load_kv(self._bound)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous, and vLLM schedules a request only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: ``wait_for_save`` stores complete blocks after the step has computed all layers."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.start_store_kv(self._bound)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return (None, None) if self._worker is None else self._worker.get_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.get_block_ids_with_load_errors()

    def get_kv_connector_stats(self) -> Any:
        from kvsidecar.integrations.vllm.vllm_metrics import ConnectorStats

        sides = [side for side in (self._scheduler, self._worker) if side is not None]
        counted = {name: value for side in sides for name, value in side.take_stats().items()}
        return ConnectorStats(counted) if counted else None

    @property
    def _bound(self) -> StepJobs:
        found = self._get_connector_metadata()
        assert isinstance(found, StepMetadata)
        return found.step

    # ---- scheduler side -------------------------------------------------------------------------------------

    @property
    def _scheduler_side(self) -> SchedulerConnector:
        assert self._scheduler is not None, "vLLM calls this on the scheduler's connector only"
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self._scheduler_side.set_worker_handshakes(
            {rank: one.handshake for rank, one in metadata.items() if isinstance(one, HandshakeMetadata)}
        )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler_side.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return StepMetadata(self._scheduler_side.build_connector_meta(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler_side.finished_recving(connector_output.finished_recving or ())
        self._scheduler_side.finished_sending(connector_output.finished_sending or ())

    def reset_cache(self) -> bool | None:
        self._scheduler_side.reset_cache()
        return True

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler_side.request_finished(request, block_ids), None

    # ---- statistics and metrics -----------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        from kvsidecar.integrations.vllm.vllm_metrics import ConnectorStats

        return ConnectorStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> Any:
        from kvsidecar.integrations.vllm.vllm_metrics import ConnectorMetrics

        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
