"""Linear layers with 4-bit or 8-bit weights in CPU memory.

Narrow weights help because memory bandwidth limits decoding. A layer's error is about the rounding error of its
weights. The kernel also quantizes input rows to bytes, which adds an error of 0.6 % of a product's magnitude. No bit
depends on the batch (``kvkernels.cpu.quantized_gemm``). The head keeps 8 bits if the layers have 4 bits: it decides the
token, and is only a quarter of a small model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Self

import torch
from kvkernels.cpu import quantized_gemm
from kvkernels.cpu.cpu_library import KernelCall, loaded_library
from kvsidecar.errors import ConfigurationError
from rich.progress import Progress
from torch import Tensor, nn

# Group sizes: inputs that share a scale and a zero. A layer uses the first size that divides its inputs.
_GROUPS = (64, 32)
_HEAD_BITS = 8
_HEADS = ("lm_head", "embed_out")
# Layers that are not quantized: routers, which choose the experts and are small.
_ROUTERS = ("gate", "router", "shared_expert_gate")
# Increase it when quantization or the kernel gives other bits, so that older chunks are not reused.
_VERSION = 1


class CodedLinear(nn.Module):
    """Linear layer over a weight in codes; a subclass computes the product."""

    def __init__(self, weight: quantized_gemm.QuantizedWeight, bias: Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.inputs, weight.outputs
        self.quantized, self._bias = weight, None if bias is None else bias.detach()

    @classmethod
    def empty(cls, outputs: int, inputs: int, bias: Tensor | None) -> Self:
        """Create a layer without a weight, for ``set_weight``."""
        nothing = torch.empty(outputs // quantized_gemm.OUTPUTS, 0, dtype=torch.uint8)
        return cls(quantized_gemm.QuantizedWeight(nothing, inputs, 0, 0), bias)

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def set_weight(self, weight: quantized_gemm.QuantizedWeight) -> None:
        """Use another weight of the same shape from now on, without a copy."""
        self.quantized = weight


class QuantizedLinear(CodedLinear):
    """Drop-in for ``nn.Linear`` on a CPU, ``[..., in] -> [..., out]``.

    Computes in float32, or in bfloat16 if the bias has that dtype.
    """

    def call(self, x: Tensor, y: Tensor) -> KernelCall:
        """Kernel call for a CPU graph: product of contiguous ``x [rows, in]`` into ``y [rows, out]``."""
        return quantized_gemm.gemm_call(x, self.quantized, self._bias, y)

    def forward(self, x: Tensor) -> Tensor:
        out = quantized_gemm.gemm(x.reshape(-1, self.in_features), self.quantized, self._bias)
        return out.view(*x.shape[:-1], self.out_features)

    def in_float32(self, x: Tensor) -> Tensor:
        """Compute ``x [rows, in] -> [rows, out]`` without rounding the result, in float32."""
        return quantized_gemm.gemm(x.float(), self.quantized, None if self._bias is None else self._bias.float())


def can_join(parts: Sequence[nn.Module]) -> bool:
    """True if layers over the same input can be joined.

    Either all layers are quantized, or none is.
    """
    return len({isinstance(part, QuantizedLinear) for part in parts}) == 1


def join_linears(parts: Sequence[QuantizedLinear]) -> QuantizedLinear:
    """Join layers that pass ``can_join`` into one."""
    biases = [p._bias for p in parts if p._bias is not None]
    return QuantizedLinear(
        quantized_gemm.concatenate([p.quantized for p in parts]), torch.cat(biases) if biases else None
    )


def pick_weight_bits(wanted: str | int, stored: int, device: torch.device, streams: bool = False) -> int:
    """Choose the bits per weight in memory for a checkpoint with ``stored`` bits.

    ``auto`` is the stored width; on a CPU without kernels for quantized weights it is 16. Another device than a CPU can
    reduce the width only if it ``streams`` layers. Raises ConfigurationError for a width that the device does not
    support.
    """
    if wanted == "auto":
        return stored if device.type != "cpu" or quantized_gemm.kernel() is not None else 16
    width = int(wanted)
    if width == 8 and stored == 4:
        raise ConfigurationError("weights is 8, but the checkpoint has 4 bits; allowed are auto, 4 and 16")
    if width < stored and device.type != "cpu" and not streams:
        raise ConfigurationError(
            f"weights is {width}, and device {device} quantizes no weights without streaming (stream is off); allowed "
            "are auto and 16"
        )
    if width < 16 and device.type == "cpu" and quantized_gemm.kernel() is None:
        raise ConfigurationError(f"weights is {width}, but {loaded_library().why}; allowed are auto and 16")
    return width


def quantize_linears(model: nn.Module, bits: int, shown: bool = True) -> int:
    """Quantize the linear layers that the kernel supports; return their number.

    Quantizes one layer after the other, with a progress bar if ``shown``.
    """
    chosen = [path for path, module in model.named_modules() if type(module) is nn.Linear]
    done = 0
    with Progress(transient=True, disable=not shown) as progress:
        for path in progress.track(chosen, description=f"quantizing weights to {bits} bits"):
            done += quantize_linear(model, path, bits)
    return done


def quantize_linear(model: nn.Module, path: str, bits: int) -> bool:
    """Quantize one linear layer in place; False if the kernel does not support it."""
    name, linear = path.rpartition(".")[2], model.get_submodule(path)
    if type(linear) is not nn.Linear or name in _ROUTERS:
        return False
    kept = quantization_of(name, linear.in_features, linear.out_features, bits)
    if kept is None:
        return False
    model.set_submodule(path, QuantizedLinear(quantized_gemm.quantize(linear.weight.detach(), *kept), linear.bias))
    return True


def quantization_of(name: str, inputs: int, outputs: int, bits: int) -> tuple[int, int] | None:
    """Bits and group of a layer in a model of ``bits`` bits; None if it is not quantized."""
    group = next((g for g in _GROUPS if quantized_gemm.serves(inputs, outputs, g)), None)
    if bits == 16 or group is None:
        return None
    return max(bits, _HEAD_BITS) if name in _HEADS else bits, group


def fingerprint(weights: bytes, bits: int) -> bytes:
    """Fingerprint of a model whose linear weights are kept at ``bits`` bits."""
    return (
        weights if bits == 16 else hashlib.sha256(b"kvsidecar/quantized/%d/%d/" % (_VERSION, bits) + weights).digest()
    )
