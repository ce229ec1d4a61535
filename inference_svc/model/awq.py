"""Models with AutoAWQ's 4-bit weights (AWQ, Lin et al., MLSys 2024, arXiv:2306.00978), in its GEMM format.

On a CUDA device a layer keeps its 4 bits, repacked once for our kernels. On a CPU, where memory is cheaper and
16-bit products have the better kernels, weights are written out at load.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from kvkernels import ops
from kvkernels.cuda import awq
from kvsidecar.errors import ModelUnsupported
from rich.progress import Progress
from safetensors import safe_open
from torch import Tensor, nn
from transformers import GenerationConfig

from inference_svc.model.skeleton import skeleton

_PARTS = ("qweight", "qzeros", "scales")


class AwqLinear(nn.Module):
    """Drop-in for ``nn.Linear``, ``[..., in] -> [..., out]``, over repacked 4-bit weights."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, weights: awq.AwqWeights, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features, self._group = weights.inputs, weights.outputs, weights.group
        for name in ("codes", "scales", "zeros"):
            self.register_buffer(name, getattr(weights, name), persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        out = ops.awq_gemm(rows, self.codes, self.scales, self.zeros, self._group)
        out = out if self.bias is None else out + self.bias
        return out.view(*x.shape[:-1], self.out_features)  # type: ignore[no-any-return]


def method_of(config: Any) -> str:
    """The configuration's quantization method, or nothing."""
    return str((getattr(config, "quantization_config", None) or {}).get("quant_method", ""))


def check(config: Any) -> None:
    """Raises ModelUnsupported unless the weights are 4-bit AWQ in the GEMM format."""
    settings = config.quantization_config
    for name, wanted, given in (
        ("quant_method", "awq", method_of(config)),
        ("bits", 4, settings.get("bits", settings.get("w_bit"))),
        ("version", "gemm", str(settings.get("version", "gemm")).lower()),
        ("zero_point", True, settings.get("zero_point", True)),
    ):
        if given != wanted:
            raise ModelUnsupported(
                f"quantization_config says {name} {given!r}; allowed are AWQ models with {name} {wanted!r}, "
                "and models that are not quantized"
            )


def load(folder: Path, config: Any, dtype: torch.dtype, attention: str, device: torch.device, dense: bool) -> Any:
    """A model of a folder on a device, unquantized parts in ``dtype``. ``dense`` writes all weights out.

    Raises ModelUnsupported for another format, and for files that lack a weight of the model.
    """
    check(config)
    del config.quantization_config
    model, rotary = skeleton(config, dtype, attention)
    model.model.rotary_emb = rotary
    files = sorted(folder.glob("*.safetensors"))
    where = {name: file for file in files for name in _names(file)}
    linears = sorted(name.removesuffix(".qweight") for name in where if name.endswith(".qweight"))
    state: dict[str, Tensor] = {}
    with Progress(transient=True) as progress:
        for name, parts in progress.track(
            _quantized(linears, where), len(linears), description="reading 4-bit weights"
        ):
            weights = None if dense else _repacked(parts, dtype, device)
            if weights is None:
                state[f"{name}.weight"] = awq.reference_weight(*_wide(parts)).to(dtype)
                continue
            bias = _read(where, f"{name}.bias")
            module = AwqLinear(weights, None if bias is None else bias.to(device, dtype))
            model.set_submodule(name, module)
    held = {n for n, _ in model.named_parameters()}
    for name in sorted(held & where.keys()):
        state[name] = _tensor(where, name).to(dtype)
    missing = held - state.keys() - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    if missing:
        raise ModelUnsupported(f"the files in {folder} lack {len(missing)} weights, the first is {min(missing)}")
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as data:
        return list(data.keys())


def _tensor(where: dict[str, Path], name: str) -> Tensor:
    if name not in where:
        raise ModelUnsupported(f"the model's files have no {name}, which its 4-bit weights need")
    with safe_open(where[name], "pt") as data:
        return data.get_tensor(name)  # type: ignore[no-any-return]


def _read(where: dict[str, Path], name: str) -> Tensor | None:
    return _tensor(where, name) if name in where else None


def _quantized(linears: list[str], where: dict[str, Path]) -> Iterator[tuple[str, list[Tensor]]]:
    for name in linears:
        yield name, [_tensor(where, f"{name}.{part}") for part in _PARTS]


def _wide(parts: list[Tensor]) -> list[Tensor]:
    """With scales in float32, so that weights are rounded once."""
    return [*parts[:2], parts[2].float()]


def _repacked(parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> awq.AwqWeights | None:
    """For our kernels, or None for a shape that they do not take."""
    words, zeros, scales = (part.to(device) for part in parts)
    try:
        return awq.repack(words, zeros, scales.to(dtype))
    except ValueError:
        return None
