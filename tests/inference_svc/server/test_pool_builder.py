"""The size of a KV pool on a device: what weights and a step leave of its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kvsidecar.errors import ConfigurationError
from structlog.testing import capture_logs

from inference_svc.kv_pool.block_table import KEY_BLOCK, PAGE_TOKENS
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.models.loader import LoadedModel, load
from inference_svc.server import pool_builder, runtime
from inference_svc.server.pool_builder import build_pool
from inference_svc.server.worker_config import HOST_POOL_BYTES, WorkerConfig
from tests.kvkernels.device import contract_devices
from tests.kvkernels.device.simulated_device import SimulatedDevice
from tests.kvkernels.device.virtual_clock import costs_of
from tests.kvkernels.doubles.card import H100

simulated = contract_devices.simulated  # fixture
MEMORY, TOKEN_BYTES = 64 << 20, 6144


@pytest.fixture
def device(simulated: Callable[..., SimulatedDevice], monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """A card with little memory. Of a step, only activations and logits count."""
    monkeypatch.setattr(pool_builder, "_LIBRARIES_BYTES", 0)
    return simulated(costs=replace(costs_of(H100), memory_bytes=MEMORY))


@pytest.fixture
def loaded(device: SimulatedDevice) -> LoadedModel:
    return replace(load("demo", dtype="float32"), device=device.torch)


def config(**settings: Any) -> WorkerConfig:
    return WorkerConfig(model="demo", batch_tokens=64, batch_sequences=16, **settings)


def test_a_pool_has_what_weights_and_a_step_leave(device: SimulatedDevice, loaded: LoadedModel) -> None:
    weights = device.allocate(8 << 20)
    step = pool_builder._step_bytes(config(), loaded)
    assert 100_000 < step < 12 << 20
    pool = build_pool(config(), loaded)
    room = int(0.9 * MEMORY) - weights.nbytes - step - KEY_BLOCK * TOKEN_BYTES
    assert room - 40 * TOKEN_BYTES < pool.pages * PAGE_TOKENS * TOKEN_BYTES <= room
    del pool
    half = build_pool(config(gpu_memory_utilization=0.5), loaded)
    assert half.pages * PAGE_TOKENS * TOKEN_BYTES <= MEMORY // 2 - weights.nbytes - step
    assert MEMORY // 2 - step - 40 * TOKEN_BYTES < device.used_bytes <= MEMORY // 2 - step


def test_a_draft_models_pool_and_adapters_get_their_part(device: SimulatedDevice, loaded: LoadedModel) -> None:
    alone, padding = build_pool(config(), loaded).pages, KEY_BLOCK // PAGE_TOKENS
    assert build_pool(config(), loaded, draft=loaded).pages + padding == pytest.approx((alone + padding) / 2, abs=1)
    adapters = 10 << 20
    assert alone - build_pool(config(), loaded, adapter_bytes=adapters).pages == pytest.approx(
        adapters / PAGE_TOKENS / TOKEN_BYTES, abs=1
    )


def test_a_pool_shrinks_until_it_fits(
    device: SimulatedDevice, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may take memory after the size was chosen."""
    monkeypatch.setattr(pool_builder, "_left_for_pool", lambda *_: 2 * MEMORY)
    with capture_logs() as lines:
        pool = build_pool(config(), loaded)
    (warning,) = [line for line in lines if line["log_level"] == "warning"]
    assert warning["tokens"] < warning["planned"] == 2 * MEMORY // TOKEN_BYTES - KEY_BLOCK
    assert 0.8 * MEMORY < device.used_bytes <= MEMORY
    assert pool.pages == warning["tokens"] // PAGE_TOKENS


def test_short_memory_still_has_what_streamed_layers_left(
    device: SimulatedDevice, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_builder, "SPARE_BYTES", 1 << 20)
    weights = device.allocate(MEMORY - (8 << 20))  # leaves less than a tenth
    with capture_logs() as lines:
        pool = build_pool(config(), loaded)
    assert pool.pages == ((7 << 20) // TOKEN_BYTES - KEY_BLOCK) // PAGE_TOKENS
    assert not [line for line in lines if line["log_level"] == "warning"]
    del weights


def test_a_configured_share_is_a_limit(device: SimulatedDevice, loaded: LoadedModel) -> None:
    weights = device.allocate(MEMORY // 2)
    with pytest.raises(ConfigurationError, match=r"0 B left for a pool with gpu_memory_utilization 0\.5; this model"):
        build_pool(config(gpu_memory_utilization=0.5), loaded)
    del weights


def test_a_pool_that_shrinks_gives_its_memory_back_first(
    device: SimulatedDevice, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_pool, used = pool_builder.new_pool, list[int]()

    def refuse_once(model: LoadedModel, tokens: int, overflow: Any, ranks: Any) -> KVPool:
        used.append(device.used_bytes)
        if len(used) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return new_pool(model, tokens, overflow, ranks)

    monkeypatch.setattr(pool_builder, "new_pool", refuse_once)
    # The context is longer than the pool, so the overflow has the pool's memory.
    small = replace(loaded, context_length=1 << 14)
    build_pool(config(overflow_bytes="1GiB"), small)
    assert len(used) == 2
    assert used[1] < 0.9 * used[0], "two pools at once"


def test_a_draft_models_pool_without_memory_is_one_sentence(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    pool = build_pool(config(), loaded)
    monkeypatch.setattr(runtime, "new_pool", refuse)
    with pytest.raises(ConfigurationError, match=r"sim:0 has no memory for the draft model's pool of .*: CUDA out of"):
        runtime._draft_proposer(config(draft_model="demo"), loaded, loaded, pool)


def test_what_does_not_fit_is_one_sentence(device: SimulatedDevice, loaded: LoadedModel) -> None:
    weights = device.allocate(8 << 20)
    with pytest.raises(ConfigurationError, match=r"pool_bytes is 62\.0 MiB, which sim:0 does not have: .* or auto"):
        build_pool(config(pool_bytes="62MiB"), loaded)
    others = device.allocate(device.free_bytes())
    with pytest.raises(ConfigurationError, match=r"sim:0 has 0 B left for a pool with .*; this model needs 6\.0 KiB"):
        build_pool(config(), loaded)
    with pytest.raises(ConfigurationError, match="pool_bytes is 1000 B; this model needs"):
        build_pool(config(pool_bytes=1000), loaded)
    del weights, others


def test_a_cpus_pool_has_a_fixed_size() -> None:
    assert config().planned_pool_bytes == HOST_POOL_BYTES == 2 << 30
    assert config(pool_bytes="1GiB").planned_pool_bytes == 1 << 30
    loaded = load("demo", dtype="float32")
    pool = build_pool(WorkerConfig(model="demo", batch_sequences=2), loaded)
    assert pool.pages * PAGE_TOKENS == 2 * loaded.context_length
