"""Models of compressed-tensors with 4-bit weights (``pack-quantized``): read, and compute what their weights say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kvsidecar.errors import ModelUnsupported
from kvsidecar.models.checkpoint_files import tensor_files
from safetensors.torch import load_file, save_file

from inference_svc.models import awq_checkpoint, compressed_tensors
from inference_svc.models.linear.quantized_linear import QuantizedLinear
from inference_svc.models.loader import DEMO_MODEL, load

GROUP = 64
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
SETTINGS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": WEIGHTS, "input_activations": None, "targets": ["Linear"]}},
    "ignore": ["lm_head"],
}
Tensors = dict[str, torch.Tensor]


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers from -8 to 7 ``[rows, n]``, n a multiple of 8, as int32 ``[rows, n / 8]``."""
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.int64)
    for i in range(8):
        words += (numbers[:, i::8].long() + 8) << 4 * i
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def quantize(weight: torch.Tensor, symmetric: bool) -> tuple[Tensors, torch.Tensor]:
    """A layer's ``weight [out, in]`` in the format's parts, and what they say."""
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    if symmetric:
        scales, zeros = groups.abs().amax(-1) / 7.5, torch.zeros_like(low)
    else:
        scales = (high - low) / 15
        zeros = (-8 - low / scales).round().clamp(-8, 7)
    scales = scales.bfloat16()
    numbers = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(-8, 7)
    meant = ((numbers - zeros[..., None]) * scales.float()[..., None]).flatten(1)
    parts = {
        "weight_packed": packed(numbers.flatten(1)),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return parts if symmetric else parts | {"weight_zero_point": packed(zeros.t()).t().contiguous()}, meant


@pytest.fixture(scope="module", params=["symmetric", "asymmetric"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """The demo model in the format, and what its weights mean."""
    target = tmp_path_factory.mktemp("compressed")
    shutil.copytree(DEMO_MODEL, target, dirs_exist_ok=True)
    tensors: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(DEMO_MODEL / "model.safetensors").items():
        if "_proj.weight" in name:
            parts, meant[name] = quantize(tensor, request.param == "symmetric")
            tensors |= {name.replace("weight", part): value for part, value in parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    configure(target, SETTINGS)
    return target, meant


def configure(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def test_weights_are_what_the_format_says(folder: tuple[Path, Tensors]) -> None:
    loaded = load(str(folder[0]), device="cpu", dtype="float32", weights=16)
    weights = dict(loaded.model.named_parameters())
    for name, meant in folder[1].items():
        torch.testing.assert_close(weights[name], meant, rtol=0, atol=0)


def test_a_cpu_keeps_the_4_bits(folder: tuple[Path, Tensors]) -> None:
    loaded = load(str(folder[0]), device="cpu", dtype="float32")
    assert sum(isinstance(m, QuantizedLinear) for m in loaded.model.modules()) == len(folder[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "int-quantized"}, "format 'int-quantized'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"weights": {"num_bits": 8}}, "num_bits 8"),
        ({"weights": {"type": "float"}}, "type 'float'"),
        ({"weights": {"strategy": "channel"}}, "strategy 'channel'"),
        ({"weights": {"actorder": "group"}}, "actorder 'group'"),
        ({"input_activations": {"num_bits": 8}}, "input_activations"),
    ],
)
def test_other_schemes_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    settings = json.loads(json.dumps(SETTINGS))
    scheme = settings["config_groups"]["group_0"]
    for name, value in changes.items():
        into = scheme if name in ("weights", "input_activations") else settings
        into[name] = WEIGHTS | value if name == "weights" else value
    with pytest.raises(ModelUnsupported, match=message):
        compressed_tensors.check(settings)
    compressed_tensors.check(SETTINGS)


@pytest.mark.parametrize("groups", [["Linear"], {"group_0": "int4"}, {"group_0": {"weights": [4]}}, 7])
def test_groups_that_describe_nothing_are_refused_in_a_sentence(groups: Any) -> None:
    with pytest.raises(ModelUnsupported, match="config_groups that describe no weights"):
        compressed_tensors.check(SETTINGS | {"config_groups": groups})


@pytest.mark.parametrize("part", ["weight_scale", "weight_shape"])
def test_a_missing_part_is_named(part: str, tmp_path: Path) -> None:
    parts, _ = quantize(torch.randn(16, GROUP), False)
    del parts[part]
    save_file({f"layer.{name}": tensor for name, tensor in parts.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=f"layer.{part}"):
        awq_checkpoint.parts_in(tensor_files(tmp_path), "layer")


def test_parts_that_do_not_fit_and_an_order_of_inputs_are_refused(tmp_path: Path) -> None:
    parts, _ = quantize(torch.randn(16, GROUP), False)
    for wrong, message in (
        ({"weight_shape": torch.tensor([16, 128])}, "16 x 128 comes with weight_packed"),
        ({"weight_zero_point": torch.zeros(1, 1, dtype=torch.int32)}, "weight_zero_point"),
        ({"weight_g_idx": torch.zeros(GROUP, dtype=torch.int32)}, "weight_g_idx"),
        ({"weight_packed": parts["weight_packed"].long()}, "packed ones are int32"),
        ({"weight_scale": torch.tensor(1.0)}, "weight_scale 0 dimensions"),
        ({"weight_scale": parts["weight_scale"].int()}, "scales floating"),
        ({"weight_shape": torch.tensor(16)}, r"weight_shape has \[\] numbers"),
    ):
        tensors = {f"layer.{name}": tensor for name, tensor in (parts | wrong).items()}
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ModelUnsupported, match=message):
            awq_checkpoint.parts_in(tensor_files(tmp_path), "layer")


@pytest.mark.parametrize(
    "tensors",
    [
        {
            "weight_packed": torch.zeros(16, 8).int(),
            "weight_shape": torch.tensor([16, 64]),
            "weight_scale": torch.zeros(16, 0),
        },
        {
            "weight_packed": torch.zeros(16, 8).int(),
            "weight_shape": torch.tensor(16),
            "weight_scale": torch.zeros(16, 1),
        },
        {"weight_packed": torch.zeros(16, 8).int(), "weight_shape": torch.tensor([16, 64])},
        {"qweight": torch.zeros(64, 2).int(), "scales": torch.zeros(0, 16)},
        {"qweight": torch.zeros(64).int(), "scales": torch.zeros(1, 16)},
    ],
)
def test_estimating_a_damaged_layer_says_what_is_wrong_with_it(tensors: Tensors, tmp_path: Path) -> None:
    save_file({f"layer.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelUnsupported, match="layer"):
        awq_checkpoint.form_in(tensor_files(tmp_path), "layer")
