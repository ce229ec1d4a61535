"""Models with 4-bit weights: an AutoAWQ folder is read, and computes what its weights say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kvkernels.cpu import quantized_gemm as quantized_product
from kvsidecar.errors import ModelUnsupported
from safetensors.torch import load_file, save_file

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models import awq_checkpoint as awq_models
from inference_svc.models.attention_windows import ATTENTION_NAME
from inference_svc.models.linear.quantized_linear import QuantizedLinear
from inference_svc.models.loader import DEMO_MODEL, LoadedModel, load
from tests.inference_svc.models.layer_streaming.test_size_estimate import agrees, streamed
from tests.inference_svc.models.test_device_weights import add_head

GROUP = 64
SETTINGS = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
Tensors = dict[str, torch.Tensor]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes ``[rows, out]`` as AutoAWQ's int32 ``[rows, out / 8]``."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[:, column::8].long() << 4 * nibble
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """A layer's ``weight [out, in]`` in AutoAWQ's parts, and what they say."""
    groups = weight.float().t().reshape(-1, GROUP, weight.shape[0])
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scales = ((high - low) / 15).clamp_min(1e-5).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (groups / scales.float()[:, None] + zeros[:, None]).round().clamp(0, 15)
    meant = ((codes - zeros[:, None]) * scales.float()[:, None]).reshape(-1, weight.shape[0]).t()
    codes = codes.reshape(-1, weight.shape[0])
    return {"qweight": pack(codes.to(torch.int64)), "qzeros": pack(zeros.to(torch.int64)), "scales": scales}, meant


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo model in AutoAWQ's format, and with the same weights written out."""
    quantized, dense = tmp_path_factory.mktemp("awq"), tmp_path_factory.mktemp("dense")
    shutil.copytree(DEMO_MODEL, quantized, dirs_exist_ok=True)
    shutil.copytree(DEMO_MODEL, dense, dirs_exist_ok=True)
    small: Tensors = {}
    plain: Tensors = {}
    for name, tensor in load_file(DEMO_MODEL / "model.safetensors").items():
        if "_proj.weight" in name:
            parts, plain[name] = quantize(tensor)
            small |= {name.replace("weight", part): t.contiguous() for part, t in parts.items()}
        else:
            small[name] = plain[name] = tensor.float()
    save_file(small, quantized / "model.safetensors", {"format": "pt"})
    save_file({k: v.contiguous() for k, v in plain.items()}, dense / "model.safetensors", {"format": "pt"})
    configure(quantized, SETTINGS)
    return quantized, dense


def configure(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def logits(loaded: LoadedModel) -> torch.Tensor:
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 128, loaded.dtype, loaded.device)
    table = pool.allocate(40)
    assert table is not None
    span = forward_batch.SequenceSlice(list(range(10, 50)), 0, table, True)
    return Decoder(loaded)(forward_batch.build_batch([span], pool, loaded.device))


def test_a_cpu_writes_the_weights_out_where_16_bits_are_asked_for(folders: tuple[Path, Path]) -> None:
    quantized, dense = folders
    got = logits(load(str(quantized), device="cpu", dtype="float32", weights=16))
    expected = logits(load(str(dense), device="cpu", dtype="float32"))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(quantized_product.kernel() is None, reason="no CPU kernels run here")
def test_streaming_expects_what_it_writes(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    model, want = streamed(monkeypatch, str(folders[0]))
    agrees(model, want)
    assert model.streamed is not None
    model.streamed.close()


@pytest.mark.skipif(quantized_product.kernel() is None, reason="no CPU kernels run here")
def test_a_cpu_keeps_the_4_bits(folders: tuple[Path, Path]) -> None:
    quantized, dense = folders
    loaded, plain = load(str(quantized), device="cpu", dtype="float32"), load(str(dense), device="cpu", dtype="float32")
    layers = {name: m for name, m in loaded.model.named_modules() if isinstance(m, QuantizedLinear)}
    assert len(layers) == 7 * loaded.layers
    meant = dict(plain.model.named_parameters())
    for name, layer in layers.items():
        torch.testing.assert_close(quantized_product.dequantize(layer.quantized), meant[f"{name}.weight"])
    assert loaded.weights != load(str(quantized), device="cpu", weights=16).weights, "other keys and values"
    got, expected = logits(loaded), logits(plain)
    assert (got - expected).norm() < 0.02 * expected.norm()


def test_layers_of_4_bits_give_the_same(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a CUDA device has them; the operator runs by its reference here."""
    monkeypatch.setattr("inference_svc.models.loader.has_cuda_kernels", lambda device, dtype: True)
    monkeypatch.setattr("inference_svc.models.fused_layer_weights.can_fuse_model", lambda model: False)
    quantized, dense = folders
    loaded = load(str(quantized), device="cpu", dtype="float32")
    layers = [m for m in loaded.model.modules() if isinstance(m, awq_models.AwqLinear)]
    assert len(layers) == 7 * loaded.layers
    assert loaded.stop_tokens == load("demo").stop_tokens
    torch.testing.assert_close(
        logits(loaded), logits(load(str(dense), device="cpu", dtype="float32")), atol=1e-3, rtol=1e-3
    )


def test_a_layer_that_kernels_do_not_take_is_written_out() -> None:
    parts, meant = quantize(torch.randn(72, GROUP))
    assert awq_models._repacked(list(parts.values()), torch.float32, torch.device("cpu")) is None
    wide = awq_models.dequantize(list(parts.values()))
    torch.testing.assert_close(wide, meant)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq'"),
        ({"bits": 8}, "bits 8"),
        ({"version": "gemv"}, "version 'gemv'"),
        ({"zero_point": False}, "zero_point False"),
    ],
)
def test_other_formats_are_refused_by_name(
    folders: tuple[Path, Path], tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "model")
    configure(folder, {**SETTINGS, **settings})
    with pytest.raises(ModelUnsupported, match=message):
        load(str(folder))


def test_a_missing_part_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.layers.3.mlp.up_proj.qzeros", "model.norm.weight"):
        save_file({k: v for k, v in tensors.items() if k != name}, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ModelUnsupported, match=name):
            load(str(folder))


def test_a_head_of_its_own_is_kept(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    add_head(folder)
    model: Any = load(str(folder), device="cpu", dtype="float32").model
    assert torch.equal(model.lm_head.weight, load_file(folder / "model.safetensors")["lm_head.weight"])


@pytest.mark.parametrize("method", ["awq", "compressed-tensors"])
def test_a_quantized_mixture_is_refused_as_such(folders: tuple[Path, Path], tmp_path: Path, method: str) -> None:
    """Its experts are one weight in the model, and packed one by one in the files."""
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
    (folder / "config.json").write_text(json.dumps(config))
    configure(folder, {**SETTINGS, "quant_method": method})
    with pytest.raises(ModelUnsupported, match="quantized weights of a mixture of 4 experts are not supported"):
        load(str(folder), device="cpu")


def test_quantized_weights_that_the_model_does_not_have_are_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    known, unknown = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.experts.0.up_proj"
    tensors |= {f"{unknown}.{part}": tensors[f"{known}.{part}"].clone() for part in ("qweight", "qzeros", "scales")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelUnsupported, match=f"{unknown}, which is no linear layer of the model"):
        load(str(folder), device="cpu")


def test_a_bias_that_the_model_has_no_place_for_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A layer that keeps its 4 bits added it, and a dequantized one did not."""
    folder = Path(shutil.copytree(folders[0], tmp_path / "model"))
    name = "model.layers.0.self_attn.o_proj.bias"
    tensors = load_file(folder / "model.safetensors") | {name: torch.ones(192)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for bits in ("auto", 16):
        with pytest.raises(ModelUnsupported, match=f"{name}, which its model .* has no place for"):
            load(str(folder), device="cpu", weights=bits)


def test_attention_is_ours(folders: tuple[Path, Path]) -> None:
    assert load(str(folders[0])).model.config._attn_implementation == ATTENTION_NAME
