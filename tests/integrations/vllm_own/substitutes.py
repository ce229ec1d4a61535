"""Our connector as the substitute of the connectors in vLLM's tests, and the list of the tests that apply."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_FLOAT32, NamespaceDescriptor
from kvsidecar.chunk_layout import Geometry
from kvsidecar.integrations.vllm.connector import KVSidecarConnector, StepMetadata
from kvsidecar.integrations.vllm.step_metadata import StepJobs, WorkerHandshake
from kvsidecar.kv_transfer.block_copier import BlockCopier
from kvsidecar.kv_transfer.chunk_writer import ChunkWriter, StoredPrefix
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.kv_transfer.kv_layout import LayerKVLayout, PagedKVCache, strided_layout
from kvsidecar.net.channel import ServiceAddress
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from benchmarks.node import Node

_SCHEDULER, _ASYNC = "tests/v1/core/test_scheduler.py", "tests/v1/core/test_async_scheduler.py"
_UNIT = "tests/v1/kv_connector/unit"
_HYBRID = f"{_UNIT}/test_hma_auto_config.py"
# Tests that name a connector or its mock. The other such tests check one special connector, or its messages.
TESTS = {
    "what is found is loaded, blocks and statistics are right, all is freed": [
        f"{_SCHEDULER}::test_kv_connector_basic",
        f"{_SCHEDULER}::test_external_prefix_cache_metrics",
        f"{_SCHEDULER}::test_prefix_cache_query_not_inflated_by_connector_defer",
        f"{_SCHEDULER}::test_kv_connector_honors_skip_reading_prefix_cache",
    ],
    "too few blocks, preempted and resumed": [
        f"{_SCHEDULER}::test_kv_connector_unable_to_allocate",
        f"{_SCHEDULER}::test_kv_connector_handles_preemption",
        f"{_SCHEDULER}::test_async_load_reservation_prevents_wedge_e2e",
        f"{_SCHEDULER}::test_priority_scheduling_preemption_and_resumption_when_out_of_kv",
    ],
    "pauses, throttles and ends while something loads": [
        f"{_SCHEDULER}::test_pause_new_drains_async_kv_loads",
        f"{_SCHEDULER}::test_has_sync_kv_loads",
        f"{_SCHEDULER}::test_throttle_prefills_excludes_fully_transferred_remote_kv",
        f"{_SCHEDULER}::test_throttle_prefills_defers_remote_kv_resume_with_local_prefill",
        f"{_SCHEDULER}::test_prepend_skipped_requests_order",
        f"{_SCHEDULER}::test_abort_request_waiting_for_remote_kvs",
        f"{_SCHEDULER}::test_abort_request_finished_recving",
        f"{_SCHEDULER}::test_delayed_kv_connector_free_keeps_scheduler_active",
    ],
    "steps that overlap": [
        f"{_ASYNC}::test_connector_metadata_precedes_async_placeholder_advance",
        "tests/v1/core/test_deferred_block_free.py::test_gate_enabled_for_async_consumer",
    ],
    "the worker's side: what is bound is cleared": [
        f"{_UNIT}/test_kv_connector_lifecycle.py::test_kv_connector_mixin_clears_metadata",
    ],
    "hybrid caches are off with it": [
        f"{_HYBRID}::test_hma_auto_config[non_hma_connector]",
        f"{_HYBRID}::test_hma_auto_config[multi_mixed]",
        f"{_HYBRID}::test_explicit_hma_with_non_hma_connector_errors_at_factory",
    ],
}
_BLOCKS, _LAYERS, _DIM, _BLOCK = 64, 2, 16, 16


class Daemon:
    """A daemon, and the number of connectors that tests have created for it."""

    def __init__(self) -> None:
        self.node: Node | None = None
        self.used = 0
        self._numbers = itertools.count()

    def use(self, connector: type[KVSidecarConnector]) -> type[KVSidecarConnector]:
        self.used += 1
        return connector

    def settings(self, **more: Any) -> dict[str, Any]:
        assert self.node is not None
        return {"socket": str(self.node.cache_socket), "timeout_ms": 5000, "min_load_tokens": 1, **more}

    def namespace(self) -> NamespaceDescriptor:
        """Return a new namespace."""
        return NamespaceDescriptor(
            model_fingerprint=next(self._numbers).to_bytes(32, "big"),
            architecture="of vLLM's tests",
            layers=_LAYERS,
            kv_heads=1,
            head_dim=_DIM,
            dtype=DATA_TYPE_FLOAT32,
            format_version=keys.FORMAT_VERSION,
            bits=16,
            tensor_parallel_size=1,
        )


DAEMON = Daemon()


class Stored:
    """Stores prompts in the daemon, as a worker does that has computed them."""

    def __init__(self, block: int) -> None:
        self.described = DAEMON.namespace()
        assert DAEMON.node is not None
        self._connection = DaemonConnection(ServiceAddress(DAEMON.node.cache_socket), "another engine", self.described)
        assert self._connection.wait(10), "no daemon"
        tensors = [[torch.zeros(_BLOCKS, _BLOCK, 1, _DIM) for _ in range(2)] for _ in range(_LAYERS)]
        layers = tuple(LayerKVLayout(strided_layout(k, "bthc"), strided_layout(v, "bthc")) for k, v in tensors)
        geometry = Geometry.of(self.described)
        cache = PagedKVCache("bthc", geometry, _BLOCK, layers)
        self._writer = ChunkWriter(BlockCopier(cache), geometry, block, 5.0)

    def store(self, tokens: list[int]) -> None:
        session = self._connection.session
        assert session is not None
        root = keys.tenant_root(self._connection.namespace, b"")
        done = self._writer.store(session, root, tokens, b"", np.arange(len(tokens)), StoredPrefix())
        assert done.prefix.tokens == len(tokens), "the daemon refused some of it"

    def close(self) -> None:
        self._connection.close()


class Found(KVSidecarConnector):
    """Substitute of ``MockKVConnector``: for every prompt, the daemon has ``matched_tokens`` more tokens than vLLM.

    Like the mock, it stores nothing.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        mocked = dict(transfer.kv_connector_extra_config)
        self._matched, self._defers = mocked["matched_tokens"], mocked.get("num_defers_before_matching", 0)
        block = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        if self._matched and not mocked["is_async"]:
            pytest.skip("of connectors that load within the step; ours never does")
        if self._matched % block:
            pytest.skip("of connectors that load parts of blocks; ours loads whole ones")
        transfer.kv_connector_extra_config = DAEMON.settings(chunk_tokens=block)
        transfer.kv_role = "kv_consumer"
        super().__init__(vllm_config, role, kv_cache_config)
        self._stored = Stored(block)
        self._scheduler.set_worker_handshakes({0: WorkerHandshake(self._stored.described.SerializeToString())})
        assert all(rank.connection.wait(10) for rank in self._scheduler._ranks)
        self._asked: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        asked = self._asked[request.request_id] = self._asked.get(request.request_id, 0) + 1
        if asked <= self._defers:
            return None, False
        if self._matched:
            self._stored.store(list(request.all_token_ids[: num_computed_tokens + self._matched]))
        while (found := super().get_num_new_matched_tokens(request, num_computed_tokens))[0] is None:
            pass
        return found

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Return our jobs. Also count the requests that are new to the workers, as the mock does for the tests."""
        found: Any = super().build_connector_meta(scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        resumed = [name for name in cached.req_ids if name in cached.resumed_req_ids]
        found.requests = [*(new.req_id for new in scheduler_output.scheduled_new_reqs), *resumed]
        return found

    def shutdown(self) -> None:
        self._stored.close()
        super().shutdown()


class Plain(KVSidecarConnector):
    """Substitute of ``ExampleConnector``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        vllm_config.kv_transfer_config.kv_connector_extra_config = DAEMON.settings()
        if not kv_cache_config.kv_cache_groups:  # our connector needs the cache's layout
            spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32)
            kv_cache_config = KVCacheConfig(0, [], [KVCacheGroupSpec(["layer"], spec)])
        super().__init__(vllm_config, role, kv_cache_config)


class Plugin:
    """A pytest plugin that installs the substitutes."""

    def pytest_sessionstart(self) -> None:
        DAEMON.node = Node(workers=0, arena_bytes="64MiB")
        DAEMON.node.__enter__()

    def pytest_sessionfinish(self) -> None:
        assert DAEMON.node is not None
        DAEMON.node.__exit__(None, None, None)

    def pytest_collection_finish(self) -> None:
        from tests.v1.kv_connector.unit import test_kv_connector_lifecycle as lifecycle
        from tests.v1.kv_connector.unit import utils

        KVConnectorFactory._registry["MockKVConnector"] = lambda: DAEMON.use(Found)
        KVConnectorFactory._registry["ExampleConnector"] = lambda: DAEMON.use(Plain)
        utils.ExampleConnector = lambda *given: DAEMON.use(Plain)(*given)
        lifecycle.ExampleConnectorMetadata = lambda: StepMetadata(StepJobs())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        before = DAEMON.used
        out = yield
        if DAEMON.used == before:
            pytest.fail(f"{item.name} passed without a connector of ours")
        return out

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"connectors of ours were asked for {DAEMON.used} times")
