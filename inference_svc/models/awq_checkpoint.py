"""Loads checkpoints with 4-bit weights of AutoAWQ or compressed-tensors.

AutoAWQ's GEMM format (AWQ, Lin et al., MLSys 2024, arXiv:2306.00978) is read directly. The module
``compressed_tensors`` translates checkpoints of compressed-tensors into AutoAWQ's tensors (qweight, qzeros, scales). A
layer keeps its 4 bits, repacked once for the CUDA or CPU kernels. A layer is dequantized if the kernels do not support
it. All layers are dequantized if the device has no kernels, or if 16 bits are requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from kvkernels import awq_layout, ops
from kvkernels.cpu import quantized_gemm
from kvkernels.cpu.quantized_gemm import QuantizedWeight
from kvkernels.cuda import awq_gemm
from kvsidecar.errors import ModelUnsupported
from kvsidecar.models.checkpoint_files import tensor_files
from rich.progress import Progress
from torch import Tensor, nn

from inference_svc.models import compressed_tensors
from inference_svc.models.gguf import gguf_codes
from inference_svc.models.linear.quantized_linear import QuantizedLinear
from inference_svc.models.meta_model import build_meta_model, set_generation_config, set_weights
from inference_svc.models.mixture_of_experts import num_experts
from inference_svc.models.safetensors_reader import shape_in, tensor_in
from inference_svc.models.surplus_weights import check_surplus

METHODS = ("awq", compressed_tensors.METHOD, gguf_codes.METHOD)
_PARTS = ("qweight", "qzeros", "scales")
# Possible names of the tensor that contains the codes of a quantized linear layer.
_CODE_PARTS = ("qweight", compressed_tensors.PACKED, *gguf_codes.BITS_OF_PART)
# Parts of a weight as AutoAWQ stores them, or a weight in the layout of the CPU kernel.
PackedWeight = list[Tensor] | QuantizedWeight
# Builds a layer from its weight and bias; None for a weight that the kernels do not support.
LinearFactory = Callable[[PackedWeight, Tensor | None], nn.Module | None]


class AwqLinear(nn.Module):
    """Drop-in for ``nn.Linear``, ``[..., in] -> [..., out]``, over repacked 4-bit weights."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor

    def __init__(self, weights: awq_gemm.AwqWeights, bias: Tensor | None) -> None:
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
    """Quantization method of a configuration; empty if the configuration has none."""
    return str((getattr(config, "quantization_config", None) or {}).get("quant_method", ""))


def check_quantization(config: Any) -> None:
    """Raise ModelUnsupported unless the weights have 4 bits in a supported format, and the model is dense.

    The formats are AWQ's GEMM format and compressed-tensors' packing.
    """
    settings = config.quantization_config
    if experts := num_experts(config):
        raise ModelUnsupported(
            f"quantization_config says quant_method {method_of(config)!r}, and quantized weights of a mixture of "
            f"{experts} experts are not supported; use a checkpoint that is not quantized"
        )
    if method_of(config) == gguf_codes.METHOD:
        return
    if method_of(config) == compressed_tensors.METHOD:
        compressed_tensors.check(settings)
        return
    for name, wanted, given in (
        ("quant_method", "awq", method_of(config)),
        ("bits", 4, settings.get("bits", settings.get("w_bit"))),
        ("version", "gemm", str(settings.get("version", "gemm")).lower()),
        ("zero_point", True, settings.get("zero_point", True)),
    ):
        if given != wanted:
            raise ModelUnsupported(
                f"quantization_config says {name} {given!r}; allowed are AWQ models with {name} {wanted!r}, "
                f"models of {compressed_tensors.METHOD} with 4 bits, packed, and models that are not quantized"
            )


def cuda_linears(dtype: torch.dtype, device: torch.device) -> LinearFactory:
    """Factory of layers for the CUDA kernels."""

    def keep(parts: PackedWeight, bias: Tensor | None) -> nn.Module | None:
        weights = None if isinstance(parts, QuantizedWeight) else _repacked(parts, dtype, device)
        return None if weights is None else AwqLinear(weights, None if bias is None else bias.to(device, dtype))

    return keep


def cpu_linears(dtype: torch.dtype) -> LinearFactory:
    """Factory of layers for the CPU kernels."""

    def keep(parts: PackedWeight, bias: Tensor | None) -> nn.Module | None:
        bias = None if bias is None else bias.to(dtype)
        if isinstance(parts, QuantizedWeight):
            return QuantizedLinear(parts, bias)
        codes, zeros = (awq_layout.unpack_columns(part).t().contiguous() for part in parts[:2])
        scales = parts[2].t()
        if not torch.equal(scales.half().to(scales.dtype), scales):
            return None  # the kernel's float16 scales cannot represent these scales
        if not quantized_gemm.serves(codes.shape[1], codes.shape[0], codes.shape[1] // scales.shape[1]):
            return None
        return QuantizedLinear(quantized_gemm.pack(codes, scales, zeros, 4), bias)

    return keep


def load_awq(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    attention: str,
    keep: LinearFactory | None,
    device: torch.device = torch.device("cpu"),  # noqa: B008 - a value
) -> Any:
    """Load a model from a folder to a device, layer by layer. Its unquantized parts get ``dtype``.

    Weights for which ``keep`` builds no layer are dequantized. Raises ModelUnsupported for another format, and if the
    files lack a weight of the model, or have one that the model has no place for.
    """
    check_quantization(config)
    del config.quantization_config
    model = build_meta_model(config, dtype, attention)
    where = tensor_files(folder)
    linears = sorted(found for found in map(_linear_of, where) if found)
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if unknown := sorted({*linears} - layers):
        raise ModelUnsupported(f"{folder} has quantized weights of {unknown[0]}, which is no linear layer of the model")
    check_surplus(folder, model, where)
    state: dict[str, Tensor] = {}
    with Progress(transient=True) as progress:
        for name, parts in progress.track(
            _quantized(linears, where), len(linears), description="reading quantized weights"
        ):
            layer = keep and keep(parts, bias_in(where, name))
            if layer is None:
                state[f"{name}.weight"] = dequantize(parts).to(dtype).to(device)
            else:
                model.set_submodule(name, layer)
    held = {n for n, _ in model.named_parameters()}
    for name in sorted(held & where.keys()):
        state[name] = tensor_in(where, name).to(dtype).to(device)
    missing = held - state.keys() - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    if missing:
        raise ModelUnsupported(f"the files in {folder} lack {len(missing)} weights, the first is {min(missing)}")
    set_weights(model, state)
    set_generation_config(model, folder)
    return model


def parts_in(where: dict[str, Path], linear: str) -> PackedWeight:
    """Load the parts of a linear layer's weight.

    Raises ModelUnsupported if a part is missing or does not fit.
    """
    if codes := _gguf_codes_of(where, linear):
        return gguf_codes.stored_weight(tensor_in(where, codes.name), codes.bits)
    if f"{linear}.{compressed_tensors.PACKED}" in where:
        return _of_compressed(where, linear)
    return [tensor_in(where, f"{linear}.{part}") for part in _PARTS]


def is_packed(where: dict[str, Path], linear: str) -> bool:
    """True if a linear layer's weight is quantized."""
    return any(f"{linear}.{part}" in where for part in _CODE_PARTS)


def form_in(where: dict[str, Path], linear: str) -> tuple[int, int] | None:
    """Bits and group size of a linear layer for the CPU kernels; None if the kernels do not support the layer."""
    if codes := _gguf_codes_of(where, linear):
        return codes.bits, quantized_gemm.group_of(shape_in(where, codes.name)[-1], codes.bits)
    if f"{linear}.{compressed_tensors.PACKED}" in where:
        sizes, scales = (
            tensor_in(where, f"{linear}.{compressed_tensors.SHAPE}").tolist(),
            f"{linear}.{compressed_tensors.SCALE}",
        )
        shape, at = [int(n) for n in sizes] if isinstance(sizes, list) else [], -1
    else:
        shape, scales, at = shape_in(where, f"{linear}.qweight")[::-1], f"{linear}.scales", 0
        shape[:1] = [8 * n for n in shape[:1]]
    if scales not in where:
        raise ModelUnsupported(f"the model's files have no {scales}, which its 4-bit weights need")
    groups = (shape_in(where, scales) or [0])[at]
    if len(shape) != 2 or not groups:
        raise ModelUnsupported(f"{linear} has 4-bit weights of the shape {shape} in {groups} groups")
    outputs, inputs = shape
    return (4, inputs // groups) if quantized_gemm.serves(inputs, outputs, inputs // groups) else None


class _GgufCodes(NamedTuple):
    """Name of the tensor that has the codes of a GGUF weight, and the bits per code."""

    name: str
    bits: int


def _gguf_codes_of(where: dict[str, Path], linear: str) -> _GgufCodes | None:
    names = ((f"{linear}.{part}", bits) for part, bits in gguf_codes.BITS_OF_PART.items())
    return next((_GgufCodes(name, bits) for name, bits in names if name in where), None)


def _linear_of(name: str) -> str:
    """Name of the linear layer whose codes a tensor contains; empty for another tensor."""
    linear, _, part = name.rpartition(".")
    return linear if part in _CODE_PARTS else ""


def _of_compressed(where: dict[str, Path], linear: str) -> list[Tensor]:
    packed, scales, shape = (
        tensor_in(where, f"{linear}.{part}")
        for part in (compressed_tensors.PACKED, compressed_tensors.SCALE, compressed_tensors.SHAPE)
    )
    if f"{linear}.{compressed_tensors.ORDER}" in where:
        raise ModelUnsupported(
            f"{linear} has {compressed_tensors.ORDER}, an order of inputs (actorder), which is not supported"
        )
    zeros = f"{linear}.{compressed_tensors.ZEROS}"
    try:
        return compressed_tensors.awq_parts(packed, scales, tensor_in(where, zeros) if zeros in where else None, shape)
    except ValueError as error:
        raise ModelUnsupported(f"{linear}: {error}") from error


def bias_in(where: dict[str, Path], linear: str) -> Tensor | None:
    """Bias of a linear layer, if it has one."""
    name = f"{linear}.bias"
    return tensor_in(where, name) if name in where else None


def _quantized(linears: list[str], where: dict[str, Path]) -> Iterator[tuple[str, PackedWeight]]:
    for name in linears:
        yield name, parts_in(where, name)


def dequantize(parts: PackedWeight) -> Tensor:
    """Return the weight ``[outputs, inputs]`` in float32; a later conversion is then the only rounding."""
    if isinstance(parts, QuantizedWeight):
        return quantized_gemm.dequantize(parts)
    words, zeros, scales = parts
    return awq_layout.reference_weight(words, zeros, scales.float())


def _repacked(parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> awq_gemm.AwqWeights | None:
    """Repack for the CUDA kernels; None for a shape that they do not support."""
    words, zeros, scales = (part.to(device) for part in parts)
    try:
        return awq_gemm.repack(words, zeros, scales.to(dtype))
    except ValueError:
        return None
