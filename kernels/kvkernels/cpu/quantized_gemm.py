"""GEMM with 4-bit or 8-bit weights and int8 activations (W4A8, W8A8) on the CPU.

It supports any number of rows. A weight is ``(code - zero) * scale``, with a scale and a zero point for each output and
group of inputs, as in AWQ (Lin et al., MLSys 2024, arXiv:2306.00978) and, with other groups, in llama.cpp. Rows are
quantized to signed bytes in blocks of 64 values with one scale each; bytes and codes are multiplied in integers. A
row's bits depend neither on other rows nor on threads nor on the instruction set; ``reference`` gives the same bits.
Memory layout: ``kernels/cpu/quantized_gemm.cpp``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from kvkernels.cpu.cpu_library import Kernel, KernelCall, load_kernel, loaded_library

BITS = (4, 8)
GROUPS = (16, 32, 64, 128)
# Activations of a row that share a scale.
BLOCK = 64
# Outputs per strip.
OUTPUTS = 16
_PARAMETER_BYTES = 2 * 2 * OUTPUTS
# With more parts than threads, other threads take over parts of a delayed thread.
_PARTS_PER_THREAD = 4
# Outputs quantized at a time, which bounds the temporary memory.
_SLICE = 2048
# Weights dequantized at a time, for the same reason.
_DEQUANTIZED = 2 << 20


class _Job(ctypes.Structure):
    """``QuantizedGemmJob`` in jobs.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("next_item", "next_tile", "quantized_tiles", "parts")),
        *((name, ctypes.c_void_p) for name in ("weight", "x", "bias", "y", "bytes", "scales", "sums")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "group", "bits", "of_bf16")),
    )


@cache
def kernel() -> Kernel | None:
    """Return the kernel; None if no variant runs."""
    return load_kernel("quantized_gemm", _Job)


def describe() -> str:
    """Describe the implementation in use, in one line."""
    return (
        f"ours, {loaded_library().why}" if kernel() else f"none ({loaded_library().why}): 4-bit weights are written out"
    )


def serves(inputs: int, outputs: int, group: int) -> bool:
    """Return True if the kernel supports a weight of this shape."""
    return group in GROUPS and inputs % group == 0 and outputs % OUTPUTS == 0


def size_bytes(inputs: int, outputs: int, bits: int, group: int) -> int:
    """Return the packed size in bytes of a weight that the kernel supports."""
    return outputs // OUTPUTS * (inputs // group) * (group * OUTPUTS * bits // 8 + _PARAMETER_BYTES)


def group_of(group_bytes: int, bits: int) -> int:
    """Return the number of inputs per group, if a group takes ``group_bytes`` in a strip."""
    return (group_bytes - _PARAMETER_BYTES) * 8 // (OUTPUTS * bits)


@dataclass(frozen=True)
class QuantizedWeight:
    """Weight ``[outputs, inputs]`` of a linear layer in the kernel's layout.

    ``data`` is uint8 ``[outputs / 16, bytes]``.
    """

    data: Tensor
    inputs: int
    group: int
    bits: int

    @property
    def outputs(self) -> int:
        return int(self.data.shape[0]) * OUTPUTS


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> QuantizedWeight:
    """Pack codes ``[outputs, inputs]`` (uint8) with scales and zeros ``[outputs, inputs / group]``.

    Scales and zeros must be representable in float16. Raises ValueError for an unsupported shape or width.
    """
    (outputs, inputs), groups = codes.shape, scales.shape[1]
    group = inputs // groups
    if bits not in BITS or not serves(inputs, outputs, group):
        raise ValueError(
            f"the layer is {inputs} x {outputs} at {bits} bits in groups of {group}; the kernel takes 4 and 8 bits, "
            f"groups of {', '.join(map(str, GROUPS))} that divide the inputs, and outputs in multiples of {OUTPUTS}"
        )
    strips = outputs // OUTPUTS
    if bits == 4:
        parts = codes.view(strips, OUTPUTS, groups, group // 8, 2, 4)
        lines = parts[..., 0, :] | parts[..., 1, :] << 4
    else:
        lines = codes.view(strips, OUTPUTS, groups, group // 4, 4)
    out = torch.empty(strips, groups, group * OUTPUTS * bits // 8 + _PARAMETER_BYTES, dtype=torch.uint8)
    out[..., :-_PARAMETER_BYTES] = lines.permute(0, 2, 3, 1, 4).reshape(strips, groups, -1)
    both = torch.stack((scales, zeros)).half().view(2, strips, OUTPUTS, groups)
    out[..., -_PARAMETER_BYTES:] = both.permute(1, 3, 0, 2).contiguous().view(torch.uint8).view(strips, groups, -1)
    return QuantizedWeight(out.view(strips, -1), inputs, group, bits)


def unpack(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Unpack codes ``[outputs, inputs]`` (uint8), scales and zeros ``[outputs, inputs / group]`` (float16)."""
    strips, groups, bits = weight.data.shape[0], weight.inputs // weight.group, weight.bits
    lines = weight.data.view(strips, groups, -1)
    parameters = lines[..., -_PARAMETER_BYTES:].contiguous().view(torch.float16).view(strips, groups, 2, OUTPUTS)
    scales, zeros = parameters.permute(2, 0, 3, 1).reshape(2, weight.outputs, groups)
    packed = lines[..., :-_PARAMETER_BYTES].reshape(strips, groups, -1, OUTPUTS, 4).permute(0, 3, 1, 2, 4)
    if bits == 4:
        packed = torch.stack((packed & 15, packed >> 4), dim=-2)
    return packed.reshape(weight.outputs, weight.inputs), scales, zeros


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weight ``[outputs, inputs]``, computed in float32. Needs little memory beside the result."""
    out = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.data.device)
    strips = max(1, _DEQUANTIZED // (OUTPUTS * weight.inputs))
    for at in range(0, len(weight.data), strips):
        part = replace(weight, data=weight.data[at : at + strips])
        codes, scales, zeros = unpack(part)
        values = codes.view(part.outputs, -1, weight.group).float()
        values.sub_(zeros.float()[..., None]).mul_(scales.float()[..., None])
        out[at * OUTPUTS :][: part.outputs] = values.view(part.outputs, weight.inputs)
    return out


def quantize(weight: Tensor, bits: int, group: int) -> QuantizedWeight:
    """Quantize a float weight ``[outputs, inputs]`` to ``bits`` bits.

    Asymmetric per group; each range includes 0. Raises ValueError for an unsupported shape or width.
    """
    return concatenate([_quantize(part, bits, group) for part in torch.split(weight, _SLICE)])


def _quantize(weight: Tensor, bits: int, group: int) -> QuantizedWeight:
    if weight.shape[1] % group:
        raise ValueError(f"the layer has {weight.shape[1]} inputs, which groups of {group} do not divide")
    groups, most = weight.float().view(weight.shape[0], -1, group), 2**bits - 1
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    scales = ((high - low) / most).half()
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0)
    zeros = (-low * inverse).round_().clamp_(0, most)
    codes = (groups * inverse[..., None]).add_(zeros[..., None]).round_().clamp_(0, most).to(torch.uint8)
    return pack(codes.view(weight.shape), scales, zeros, bits)


def widen(weight: QuantizedWeight, bits: int, group: int) -> QuantizedWeight:
    """Return an equal weight with codes of ``bits`` bits, in groups of ``group`` inputs.

    Codes may only get wider, and groups smaller.
    """
    if (bits, group) == (weight.bits, weight.group):
        return weight
    codes, scales, zeros = unpack(weight)
    times = weight.group // group
    return pack(codes, scales.repeat_interleave(times, 1), zeros.repeat_interleave(times, 1), bits)


def joined_form(forms: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the bits and the group of concatenated weights: the most bits, and the smallest group."""
    return max(bits for bits, _ in forms), min(group for _, group in forms)


def concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate weights with the same inputs along their outputs, in their ``joined_form``."""
    bits, group = joined_form([(part.bits, part.group) for part in parts])
    parts = [widen(part, bits, group) for part in parts]
    first = parts[0]
    data = first.data if len(parts) == 1 else torch.cat([part.data for part in parts])
    return QuantizedWeight(data, first.inputs, first.group, first.bits)


def gemm_call(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, y: Tensor) -> KernelCall:
    """Build the call that computes ``gemm`` of contiguous ``x`` into ``y``.

    Raises RuntimeError without kernels.
    """
    serving, rows, threads = kernel(), x.shape[0], torch.get_num_threads()
    if serving is None:
        raise RuntimeError(loaded_library().why)
    blocks = weight.inputs // min(weight.group, BLOCK)
    scratch = torch.empty(rows * (weight.inputs + 8 * blocks), dtype=torch.uint8)
    at = scratch.data_ptr()
    job = _Job(
        0,
        0,
        0,
        min(weight.outputs // OUTPUTS, _PARTS_PER_THREAD * threads),
        weight.data.data_ptr(),
        x.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        at,
        at + rows * weight.inputs,
        at + rows * (weight.inputs + 4 * blocks),
        rows,
        weight.inputs,
        weight.outputs,
        weight.group,
        weight.bits,
        x.dtype == torch.bfloat16,
    )
    return KernelCall(serving, job, (x, weight, bias, y, scratch), counters=3)


def gemm(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Multiply ``x [rows, inputs]`` by the weight and add ``bias [outputs]``: ``[rows, outputs]``.

    ``x`` is float32 or bfloat16. Bias and result have the dtype of ``x``. Raises RuntimeError without kernels.
    """
    y = x.new_empty(x.shape[0], weight.outputs)
    gemm_call(x.contiguous(), weight, bias, y).run(torch.get_num_threads())
    return y


def reference(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Compute ``gemm`` in plain torch, with the same bits: the test oracle."""
    codes, scales, zeros = (part.double() for part in unpack(weight))
    block = min(weight.group, BLOCK)
    blocks = x.float().view(x.shape[0], -1, block)
    most = blocks.abs().amax(2)
    inverse = torch.where(most == 0, 0.0, torch.full_like(most, 127) / most)  # torch computes 127 / x as 127 * (1 / x)
    numbers = (blocks * inverse[..., None]).round().double()
    multiples = most * torch.tensor(1 / 127, dtype=torch.float32)
    total = torch.zeros(x.shape[0], weight.outputs)
    for i in range(blocks.shape[1]):
        group = i * block // weight.group
        exact = numbers[:, i] @ (codes[:, i * block : (i + 1) * block] - zeros[:, group, None]).t()
        factor = multiples[:, i, None] * scales[:, group].float()
        total = (exact.float().double() * factor.double() + total.double()).float()
    return (total if bias is None else total + bias.float()).to(x.dtype)
