"""Streamed layers compute what resident ones do, to the bit, with every slot poisoned as soon as it is released."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kvkernels.cpu import large_pages, quantized_gemm
from torch import Tensor

from inference_svc.engine.engine import Engine
from inference_svc.engine.engine_stats import EngineLimits
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.models import fused_layer_weights, loader
from inference_svc.models.layer_streaming.residency_plan import StreamingOptions
from inference_svc.models.layer_streaming.weight_form import bytes_of, form_of, weight_view
from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.loader import DEMO_MODEL, LoadedModel, load
from inference_svc.models.supported_architectures import SUPPORTED
from inference_svc.sequence.kv_connector import NullKVConnector
from tests.inference_svc.models.layer_streaming.conftest import computed
from tests.inference_svc.models.test_architectures import build
from tests.inference_svc.models.test_device_weights import add_head

FULL = StreamingOptions("full_stream", slots=2, poison_freed_slots=True)
MODES = {
    "full": FULL,
    "ffn": replace(FULL, mode="ffn_only_stream", slots=3),
    "partial": replace(FULL, mode="partial_resident", keep_first=3, keep_last=2),
    "all kept": replace(FULL, mode="partial_resident", keep_first=12),
}
KINDS = [("float32", 16), ("bfloat16", 16), ("float32", 8), ("float32", 4), ("bfloat16", 4)]


def streamed(dtype: str, bits: int, asked: StreamingOptions, name: str = "demo") -> LoadedModel:
    return load(name, device="cpu", dtype=dtype, weights=bits, stream=asked)


def agree(loaded: LoadedModel, want: list[Tensor]) -> None:
    assert loaded.streamed is not None
    try:
        got = computed(loaded)
    finally:
        loaded.streamed.close()
    assert all(torch.isfinite(x).all() for x in got[:-1]), "a slot was read that had been released"
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("dtype", "bits"), KINDS)
def test_every_mode_gives_the_bits_of_the_resident_model(home: Path, dtype: str, bits: int) -> None:
    if bits < 16 and quantized_gemm.kernel() is None:
        pytest.skip("no CPU kernels run here")
    resident = load("demo", device="cpu", dtype=dtype, weights=bits)
    want, before = computed(resident), set(home.glob("demo_model-*/weights.bin"))
    for name, asked in MODES.items():
        loaded = streamed(dtype, bits, asked)
        assert loaded.streamed is not None
        assert loaded.weights == resident.weights, "their keys and values are each other's"
        assert len(loaded.streamed.fused) == 12
        read = {"full": 12, "ffn": 12, "partial": 7, "all kept": 0}[name]
        assert sum(p.value != "nothing" for p in loaded.streamed.residency.parts) == read
        agree(loaded, want)
    assert len(set(home.glob("demo_model-*/weights.bin")) - before) == 1, "one file for all modes"


def test_a_head_of_its_own_is_streamed(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    add_head(folder)
    name = str(folder)
    with monkeypatch.context() as tied:
        tied.setattr(loader, "untie_own_head", lambda config, folder: False)
        before = streamed("float32", 16, FULL, name)
    assert before.streamed is not None
    before.streamed.close()
    resident = load(name, device="cpu", dtype="float32")
    assert resident.weights == before.weights
    want = computed(resident)
    assert not torch.equal(want[0], computed(load("demo", device="cpu", dtype="float32"))[0])
    agree(streamed("float32", 16, FULL, name), want)


def test_layers_that_compute_by_their_own_modules_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layer_weights, "can_fuse", lambda layer, config: False)
    for dtype, bits in (("float32", 16), ("bfloat16", 16)):
        want = computed(load("demo", device="cpu", dtype=dtype))
        monkeypatch.setenv("XDG_DATA_HOME", str(home.parent / f"own-{dtype}"))
        loaded = streamed(dtype, bits, FULL)
        assert loaded.streamed is not None
        assert loaded.streamed.fused == []
        agree(loaded, want)


@pytest.mark.parametrize("name", [name for name in SUPPORTED if "Moe" not in name and "Mixtral" not in name])
def test_every_architecture_from_its_files(home: Path, tmp_path: Path, name: str) -> None:
    _, eager, _ = build(name)
    eager.save_pretrained(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / file, tmp_path / file)
    agree(streamed("float32", 16, FULL, str(tmp_path)), computed(load(str(tmp_path), device="cpu", dtype="float32")))


def test_random_weights_are_those_of_the_resident_model_though_drawn_layer_by_layer(home: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        agree(streamed(dtype, 16, FULL, "shape:tiny"), computed(load("shape:tiny", device="cpu", dtype=dtype)))


def test_what_is_resident_costs_no_slot_and_no_thread(home: Path) -> None:
    loaded = streamed("float32", 16, MODES["all kept"])
    assert loaded.streamed is not None
    assert loaded.streamed.read_ahead is None
    assert load("demo", device="cpu", dtype="float32", stream=StreamingOptions("auto")).streamed is None, "it fits"
    tight = load(
        "demo", device="cpu", dtype="float32", stream=StreamingOptions("auto", memory_bytes=1 << 50, pool_bytes=1 << 10)
    )
    assert tight.streamed is None


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN packs no bfloat16 here")
def test_packed_weights_over_memory_of_ours_are_those_that_were_packed() -> None:
    weight, x = torch.randn(256, 128).bfloat16(), torch.randn(5, 128).bfloat16()
    layer, other = PackedLinear(weight, None), PackedLinear(torch.randn(256, 128).bfloat16(), None)
    form = form_of(layer)
    assert form == form_of(other), "which a file's layout is compared by"
    memory = large_pages.allocate(form.size_bytes)
    memory.copy_(bytes_of(layer))
    want = layer(x)
    other.set_weight(weight_view(form, memory))
    assert torch.equal(other(x), want)
    memory.fill_(0xFF)
    assert other(x).isnan().all(), "no copy"


def test_a_first_long_prompt_is_no_hung_step(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a minute it counted as hung, so that a worker of a large model was killed again and again."""
    monkeypatch.setattr("inference_svc.engine.engine.time_once", lambda run, rows: 20.0 if run(rows) else 0.0)
    model = streamed("float32", 16, FULL)
    pool = KVPool(model.layers, model.kv_heads, model.head_dim, 1024, model.dtype, model.device)
    engine = Engine(model, pool, NullKVConnector(), EngineLimits(max_num_batched_tokens=512))
    try:
        assert engine.max_step_seconds >= 4 * 20 * 512 / 64
    finally:
        engine.stop()
