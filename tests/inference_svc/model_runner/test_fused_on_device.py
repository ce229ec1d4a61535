"""An engine whose layers are fused, on a simulated device that reports accesses without an order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from kvkernels import ops
from kvkernels.cuda.cuda_library import Kernels

from inference_svc.engine.engine import Engine
from inference_svc.models import fused_layer_weights, loader
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


def answers(folder: Path, place: torch.device, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the answers of an engine whose layers and attention ``kernels`` compute; some requests run together."""
    monkeypatch.setattr(ops, "find_kernels", lambda device, dtype: kernels)
    monkeypatch.setattr(ops, "fits", lambda device, kernel, shared_bytes: True)
    monkeypatch.setattr(fused_layer_weights, "can_fuse_model", lambda model: False)  # the CPU's own fused layers
    monkeypatch.setattr(pool_builder, "find_library_attention", lambda device: None)
    monkeypatch.setattr(loader, "pick_device", torch.device)
    loaded = loader.load(str(folder), device=str(place), dtype="bfloat16")
    engine = Engine(loaded, pool_builder.new_pool(loaded, 512), NullKVConnector())
    assert engine.decoder._fused is not None
    first = prompt(1, 90)
    found = []
    for several in ([first], [first + prompt(2, 9), prompt(3, 33)]):
        requests = [Request(ids, 4) for ids in several]
        for request in requests:
            engine.submit(request.sequence)
        found += [request.tokens() for request in requests]
    idle(engine)
    engine.check_integrity()
    engine.stop()
    return found


@pytest.mark.parametrize("device", list(Schedule), indirect=True)
def test_fused_layers_order_all_their_accesses(
    device: SimulatedDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulated = library()
    want = answers(folder, torch.device("cpu"), emulated, monkeypatch)
    assert answers(folder, device.torch, SimulatedKernels(device, emulated), monkeypatch) == want
    kinds = {name.rsplit("_bf16", 1)[0] for name in device.launched}
    assert kinds >= {"add_norm", "rope", "silu_and_mul"}, kinds
    assert any(kind.startswith("attention") for kind in kinds)
