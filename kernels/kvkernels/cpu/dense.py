"""Products of float32 rows with dense weights on the CPU, for any number of rows.

What decodes is bound by bytes: a weight that came in 16 bits is kept in 16 bits, and widened on its way into float32
products, which CPUs without 16-bit arithmetic compute as fast as memory gives the weight. A row's bits depend neither
on other rows nor on threads nor on the instruction set, and ``reference`` gives the same ones.
``kernels/cpu/dense.cpp`` says how a weight lies in memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkernels.cpu.library import Kernel, found

# Outputs of a strip.
OUTPUTS = 32
# Inputs whose sum is had before it is added to the others'.
BLOCK = 128
# In the order of their numbers in dense.cpp.
KEPT = (torch.float32, torch.bfloat16, torch.float16)
# With more parts than threads, a thread that is held up leaves some to the others. Many rows are turned over for each.
_PARTS_PER_THREAD = 4
_MANY_ROWS = 13
# Outputs that are turned over at a time, so that what is in between stays small.
_SLICE = 2048


class _Job(ctypes.Structure):
    """``DenseJob`` in jobs.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("taken", "parts")),
        *((name, ctypes.c_void_p) for name in ("weight", "x", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "kept")),
    )


@cache
def kernel() -> Kernel | None:
    """The kernel, or None where no variant runs."""
    library = found().library
    return None if library is None else library.kernel("dense", _Job)


def about() -> str:
    """A line on what serves here."""
    return f"ours, {found().why}" if kernel() else f"torch's ({found().why})"


@dataclass(frozen=True)
class Dense:
    """A linear layer's weight ``[outputs, inputs]`` as the kernel wants it: ``data [strips, inputs, 32]``, zeros behind
    the last output."""

    data: Tensor
    outputs: int

    @property
    def inputs(self) -> int:
        return int(self.data.shape[1])


def size_bytes(inputs: int, outputs: int, kept: torch.dtype) -> int:
    """What a weight takes."""
    return -(-outputs // OUTPUTS) * OUTPUTS * inputs * kept.itemsize


def narrowest(weight: Tensor) -> torch.dtype:
    """The smallest type that holds every number of a float32 weight exactly."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(part.to(dtype).float(), part) for part in torch.split(weight.float(), _SLICE)):
            return dtype
    return torch.float32


def pack(weight: Tensor, kept: torch.dtype | None = None) -> Dense:
    """A weight ``[outputs, inputs]`` of floats, kept at ``kept``, or as ``narrowest`` says."""
    outputs, inputs = weight.shape
    kept = narrowest(weight) if kept is None else kept
    data = torch.empty(-(-outputs // OUTPUTS), inputs, OUTPUTS, dtype=kept)
    for first in range(0, outputs, _SLICE):
        part = weight[first : first + _SLICE].to(kept)
        part = F.pad(part, (0, 0, 0, -len(part) % OUTPUTS)).view(-1, OUTPUTS, inputs)
        data[first // OUTPUTS : first // OUTPUTS + len(part)] = part.transpose(1, 2)
    return Dense(data, outputs)


def unpack(weight: Dense) -> Tensor:
    """The weight ``[outputs, inputs]`` in float32."""
    return weight.data.transpose(1, 2).reshape(-1, weight.inputs)[: weight.outputs].float()


def product(x: Tensor, weight: Dense, bias: Tensor | None) -> Tensor:
    """``x [rows, inputs]`` times the weight, plus ``bias [outputs]``: ``[rows, outputs]``, all float32. Raises
    RuntimeError without kernels."""
    serving, rows, threads = kernel(), x.shape[0], torch.get_num_threads()
    if serving is None:
        raise RuntimeError(found().why)
    x = x.contiguous()
    y = x.new_empty(rows, weight.outputs)
    job = _Job(
        0,
        min(len(weight.data), threads if rows >= _MANY_ROWS else _PARTS_PER_THREAD * threads),
        weight.data.data_ptr(),
        x.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        rows,
        weight.inputs,
        weight.outputs,
        KEPT.index(weight.data.dtype),
    )
    serving.together(job, threads)
    return y


def reference(x: Tensor, weight: Dense, bias: Tensor | None) -> Tensor:
    """The same in plain torch, with the same bits."""
    numbers, dense = x.double(), unpack(weight).double()
    total = torch.zeros(len(x), weight.outputs)
    for first in range(0, weight.inputs, BLOCK):
        block = torch.zeros(len(x), weight.outputs)
        for i in range(first, min(first + BLOCK, weight.inputs)):
            block = (block.double() + numbers[:, i, None] * dense[None, :, i]).float()
        total = total + block if first else block
    return total if bias is None else total + bias
