"""An engine whose layers are fused, on a simulated device that reports accesses without an order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from kvkernels import ops
from kvkernels.cuda.cuda_library import Kernels
from kvkernels.device.visible_devices import device_of
from torch import Tensor

from inference_svc.engine.engine import Engine
from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.host_overflow import HostOverflow
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import cuda_attention, cuda_graphs
from inference_svc.model_runner.cuda_graphs import CudaGraphs
from inference_svc.model_runner.forward_batch import CudaIndex, SequenceSlice
from inference_svc.models import fused_layer_weights, loader
from inference_svc.models.linear import dense_linear
from inference_svc.models.linear.plain_linear import PlainLinear
from inference_svc.scheduling import copy_on_write
from inference_svc.sequence.kv_connector import NullKVConnector
from inference_svc.server import pool_builder
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.server.test_load import Request, idle
from tests.kvkernels.device.simulated_device import SimulatedDevice
from tests.kvkernels.device.simulated_kernels import SimulatedKernels
from tests.kvkernels.device.simulated_stream import Schedule
from tests.kvkernels.doubles import device_place
from tests.kvkernels.emulated.conftest import library

device = device_place.device  # fixture
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096, "hidden_size": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights whose head size our attention kernels support, with the demo model's tokenizer."""
    at = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(num_hidden_layers=2, intermediate_size=128, **SIZES)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(at)
    transformers.AutoTokenizer.from_pretrained("inference_svc/demo_model").save_pretrained(at)
    return at


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products whose bits depend neither on the batch nor on the device: those of oneDNN in bfloat16 may."""

    def forward(linear: PlainLinear, x: Tensor) -> Tensor:
        return F.linear(x.double(), linear.weight.double()).to(x.dtype)

    monkeypatch.setattr(PlainLinear, "forward", forward)
    for module in (dense_linear, fused_layer_weights):
        monkeypatch.setattr(module, "linear_for", PlainLinear)


def made(
    folder: Path, place: torch.device, kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tokens: int, beyond: int = 0
) -> Engine:
    """Create an engine whose layers and attention ``kernels`` compute, with a pool and an overflow of such sizes."""
    monkeypatch.setattr(ops, "find_kernels", lambda device, dtype: kernels)
    monkeypatch.setattr(ops, "fits", lambda device, kernel, shared_bytes: True)
    monkeypatch.setattr(fused_layer_weights, "can_fuse_model", lambda model: False)  # the CPU's own fused layers
    monkeypatch.setattr(pool_builder, "find_library_attention", lambda device: None)
    monkeypatch.setattr(loader, "pick_device", torch.device)
    loaded = loader.load(str(folder), device=str(place), dtype="bfloat16")
    shape, overflow = (loaded.layers, loaded.kv_heads, loaded.head_dim, tokens, beyond, loaded.dtype), None
    if beyond:
        overflow = HostOverflow(device_of(place).extended, *shape)
    engine = Engine(loaded, pool_builder.new_pool(loaded, tokens, overflow), NullKVConnector())
    assert engine.decoder._fused is not None
    return engine


def answers(engine: Engine, asked: list[list[list[int]]], length: int = 4) -> list[list[int]]:
    """Return the answers to prompts. The prompts of an inner list run together."""
    found = []
    for several in asked:
        requests = [Request(ids, length) for ids in several]
        for request in requests:
            engine.submit(request.sequence)
        found += [request.tokens() for request in requests]
    idle(engine)
    engine.check_integrity()
    engine.stop()
    return found


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("device", list(Schedule), indirect=True)
def test_fused_layers_order_all_their_accesses(
    device: SimulatedDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated, first = library(), prompt(1, 90)
    asked = [[first], [first + prompt(2, 9), prompt(3, 33)]]
    want = answers(made(folder, torch.device("cpu"), emulated, monkeypatch, 512), asked)
    kernels = SimulatedKernels(device, emulated)
    engine = made(folder, device.torch, kernels, monkeypatch, 512)
    assert answers(engine, asked) == want
    assert engine._core._graphs is not None
    assert engine._core._graphs._recorded, "decode steps were not recorded"
    kinds = {name.rsplit("_bf16", 1)[0] for name in device.launched}
    assert kinds >= {"add_norm", "rope", "silu_and_mul"}, kinds
    assert any(kind.startswith("attention") for kind in kinds)


@pytest.mark.usefixtures("exact_products")
def test_running_sequences_share_a_prefix_that_attention_reads_once(
    device: SimulatedDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts, three that begin with each of them in turns, and the next turns of two of these."""
    first, second, free = prompt(1, 150), prompt(2, 150), list[int]()
    beside = [begin + prompt(n, 9 + n) for n in (3, 4, 5) for begin in (first, second)]
    asked = [[first, second], beside, [beside[0] + prompt(6, 20), beside[2] + prompt(7, 30)]]

    class Watched(CudaGraphs):
        def serves(self, spans: list[SequenceSlice]) -> bool:
            free.append(self._pool.free_pages)
            return super().serves(spans)

    monkeypatch.setattr(cuda_graphs, "CudaGraphs", Watched)
    kernels, lowest, found = SimulatedKernels(device, library()), list[int](), list[list[list[int]]]()
    for least, prefixes in ((1024, {0}), (96, {0, 1, 2})):
        monkeypatch.setattr(copy_on_write, "_MIN_RANGE_TOKENS", least)
        monkeypatch.setattr(copy_on_write, "_RANGE_STEP", PAGE_TOKENS)
        engine = made(folder, device.torch, kernels, monkeypatch, 2048)
        found.append(answers(engine, asked, 6))
        assert engine._core._graphs is not None
        assert {bucket.prefixes for bucket in engine._core._graphs._recorded} == prefixes
        lowest.append(min(free))
        free.clear()
    assert found[0] == found[1]
    shared = len(first) // PAGE_TOKENS
    assert lowest[1] - lowest[0] >= 4 * shared, "two sequences with each prefix have a copy of it, or share it"


def test_a_context_beyond_the_pool_is_read_from_host_memory(
    device: SimulatedDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of four times the pool, beside others, and the next turn of one of them."""
    emulated, long = library(), prompt(1, 560)
    asked = [[long, prompt(2, 40)], [prompt(3, 40), long + prompt(4, 20)]]
    want = answers(made(folder, torch.device("cpu"), emulated, monkeypatch, 2048), asked)
    copied: list[slice] = []
    index_of = cuda_attention._index_of

    def seen(*given: Any) -> CudaIndex:
        copied.extend(part.copied for part in [index_of(*given)] if part.copied is not None)
        return index_of(*given)

    monkeypatch.setattr(cuda_attention, "_index_of", seen)
    engine = made(folder, device.torch, SimulatedKernels(device, emulated), monkeypatch, 128, 1024)
    before = device.used_bytes
    assert answers(engine, asked) == want
    assert engine.stats.overflow_admissions == 2
    first = engine.pool.first_overflow_slot
    assert {at.start for at in copied} == {first}, "parts of prompts, and no decode step"
    assert max(at.stop for at in copied) == first + 580
    assert device.used_bytes - before < 560 * KVPool.bytes_per_token(2, 2, 64, torch.bfloat16)


def test_a_preempted_sequence_waits_in_host_memory(
    device: SimulatedDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, asked = SimulatedKernels(device, library()), [[prompt(1, 60), prompt(2, 60)]]
    large = made(folder, device.torch, kernels, monkeypatch, 2048)
    want = answers(large, asked, 70)
    assert large.stats.preemptions == 0
    engine = made(folder, device.torch, kernels, monkeypatch, 256, 1024)
    assert answers(engine, asked, 70) == want
    assert engine.stats.preemptions == 1
    assert engine.stats.overflow_admissions == 0, "it continues in the pool"
    assert not any(table.in_overflow for table in engine._core.prefix_cache.tables), "the answer has replaced the copy"
