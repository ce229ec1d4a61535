"""Products with weights of 4 or 8 bits on the CPU, for any number of rows.

A weight is ``(code - zero) * scale``, with a scale and a zero for each output and group of inputs: AWQ's way (Lin et
al., MLSys 2024, arXiv:2306.00978), and llama.cpp's with other groups. Rows become signed bytes, 64 numbers by the
largest of them, and bytes and codes are multiplied in integers. So a row's bits depend neither on the other rows nor on
threads nor on the instruction set, and ``reference`` gives the same ones. ``kernels/cpu/quantized.cpp`` says how a
weight lies in memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvkernels.cpu.cpu_library import Call, Kernel, best, found

BITS = (4, 8)
GROUPS = (32, 64, 128)
# Numbers of a row that share a multiple.
BLOCK = 64
# Outputs of a strip.
OUTPUTS = 16
_PARAMETER_BYTES = 2 * 2 * OUTPUTS
# With more parts than threads, a thread that is held up leaves some to the others.
_PARTS_PER_THREAD = 4
# Outputs that are quantized at a time, so that what is in between stays small.
_SLICE = 2048


class _Job(ctypes.Structure):
    """``QuantizedJob`` in jobs.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("taken", "quantizing", "quantized", "parts")),
        *((name, ctypes.c_void_p) for name in ("weight", "x", "bias", "y", "bytes", "scales", "sums")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "group", "bits", "of_bf16")),
    )


@cache
def kernel() -> Kernel | None:
    """The kernel, or None where no variant runs."""
    return best("quantized", _Job)


def about() -> str:
    """A line on what serves here."""
    return f"ours, {found().why}" if kernel() else f"none ({found().why}): 4-bit weights are written out"


def serves(inputs: int, outputs: int, group: int) -> bool:
    """Whether the kernel takes a weight of such a shape."""
    return group in GROUPS and inputs % group == 0 and outputs % OUTPUTS == 0


def size_bytes(inputs: int, outputs: int, bits: int, group: int) -> int:
    """What a weight takes that the kernel serves."""
    return outputs // OUTPUTS * (inputs // group) * (group * OUTPUTS * bits // 8 + _PARAMETER_BYTES)


@dataclass(frozen=True)
class Quantized:
    """A linear layer's weight ``[outputs, inputs]`` as the kernel wants it: uint8 ``data [outputs / 16, bytes]``."""

    data: Tensor
    inputs: int
    group: int
    bits: int

    @property
    def outputs(self) -> int:
        return int(self.data.shape[0]) * OUTPUTS


def pack(codes: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Quantized:
    """A weight of codes ``[outputs, inputs]`` (uint8) with scales and zeros ``[outputs, inputs / group]``, which halves
    must be able to hold. Raises ValueError for a shape or a width that the kernel does not take."""
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
    return Quantized(out.view(strips, -1), inputs, group, bits)


def unpack(weight: Quantized) -> tuple[Tensor, Tensor, Tensor]:
    """Codes ``[outputs, inputs]`` (uint8), scales and zeros ``[outputs, inputs / group]`` (float16): what ``pack`` was
    given."""
    strips, groups, bits = weight.data.shape[0], weight.inputs // weight.group, weight.bits
    lines = weight.data.view(strips, groups, -1)
    parameters = lines[..., -_PARAMETER_BYTES:].contiguous().view(torch.float16).view(strips, groups, 2, OUTPUTS)
    scales, zeros = parameters.permute(2, 0, 3, 1).reshape(2, weight.outputs, groups)
    packed = lines[..., :-_PARAMETER_BYTES].reshape(strips, groups, -1, OUTPUTS, 4).permute(0, 3, 1, 2, 4)
    if bits == 4:
        packed = torch.stack((packed & 15, packed >> 4), dim=-2)
    return packed.reshape(weight.outputs, weight.inputs), scales, zeros


def dense(weight: Quantized) -> Tensor:
    """The weight ``[outputs, inputs]`` in float32."""
    codes, scales, zeros = unpack(weight)
    scales, zeros = (x.float().repeat_interleave(weight.group, 1) for x in (scales, zeros))
    return (codes.float() - zeros) * scales


def quantize(weight: Tensor, bits: int, group: int) -> Quantized:
    """A weight ``[outputs, inputs]`` of floats at so many bits, each group from its smallest number, or 0, to its
    largest, or 0. Raises ValueError for a shape or a width that the kernel does not take."""
    return joined([_quantize(part, bits, group) for part in torch.split(weight, _SLICE)])


def _quantize(weight: Tensor, bits: int, group: int) -> Quantized:
    if weight.shape[1] % group:
        raise ValueError(f"the layer has {weight.shape[1]} inputs, which groups of {group} do not divide")
    groups, most = weight.float().view(weight.shape[0], -1, group), 2**bits - 1
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    scales = ((high - low) / most).half()
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0)
    zeros = (-low * inverse).round_().clamp_(0, most)
    codes = (groups * inverse[..., None]).add_(zeros[..., None]).round_().clamp_(0, most).to(torch.uint8)
    return pack(codes.view(weight.shape), scales, zeros, bits)


def joined(parts: Sequence[Quantized]) -> Quantized:
    """One weight of several with the same inputs, groups and bits: their outputs one after the other."""
    first = parts[0]
    data = first.data if len(parts) == 1 else torch.cat([part.data for part in parts])
    return Quantized(data, first.inputs, first.group, first.bits)


def call(x: Tensor, weight: Quantized, bias: Tensor | None, y: Tensor) -> Call:
    """``product`` of contiguous ``x`` into ``y``. Raises RuntimeError without kernels."""
    serving, rows, threads = kernel(), x.shape[0], torch.get_num_threads()
    if serving is None:
        raise RuntimeError(found().why)
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
    return Call(serving, job, (x, weight, bias, y, scratch), counters=3)


def product(x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
    """``x [rows, inputs]``, float32 or bfloat16, times the weight, plus ``bias [outputs]`` of the same type: ``[rows,
    outputs]`` of that type. Raises RuntimeError without kernels."""
    y = x.new_empty(x.shape[0], weight.outputs)
    call(x.contiguous(), weight, bias, y).together(torch.get_num_threads())
    return y


def reference(x: Tensor, weight: Quantized, bias: Tensor | None) -> Tensor:
    """The same in plain torch, with the same bits."""
    codes, scales, zeros = (part.double() for part in unpack(weight))
    block = min(weight.group, BLOCK)
    blocks = x.float().view(x.shape[0], -1, block)
    most = blocks.abs().amax(2)
    inverse = torch.where(most == 0, 0.0, torch.full_like(most, 127) / most)  # 127 / x were 127 times 1 / x
    numbers = (blocks * inverse[..., None]).round().double()
    multiples = most * torch.tensor(1 / 127, dtype=torch.float32)
    total = torch.zeros(x.shape[0], weight.outputs)
    for i in range(blocks.shape[1]):
        group = i * block // weight.group
        exact = numbers[:, i] @ (codes[:, i * block : (i + 1) * block] - zeros[:, group, None]).t()
        factor = multiples[:, i, None] * scales[:, group].float()
        total = (exact.float().double() * factor.double() + total.double()).float()
    return (total if bias is None else total + bias.float()).to(x.dtype)
