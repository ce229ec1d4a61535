"""Products of float32 rows with dense weights on the CPU, for any number of rows.

What decodes is bound by bytes: a weight is kept as narrow as it came, in 16 bits or as the codes of a checkpoint that
was quantized to 4 or 8 (``kvkernels.cpu.code_recovery``), and widened on its way into float32 products, which CPUs
without 16-bit arithmetic compute as fast as memory gives the weight. The numbers are the same
ones. A row's bits depend neither on other rows nor on threads nor on the instruction set, and ``reference`` gives the
same ones.
``kernels/cpu/dense.cpp`` says how a weight lies in memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkernels.cpu import code_recovery
from kvkernels.cpu.cpu_library import Call, Kernel, best, found

# Outputs of a strip.
OUTPUTS = code_recovery.OUTPUTS
# Inputs whose sum is had before it is added to the others'.
BLOCK = 128
# How weights are kept, in the order of their numbers in dense.cpp.
KEPT = ("float32", "bfloat16", "float16", "coded4", "coded8")
# With more parts than threads, a thread that is held up leaves some to the others. Many rows are turned over for each.
_PARTS_PER_THREAD = 4
_MANY_ROWS = 97
# Outputs that are turned over at a time, so that what is in between stays small.
_SLICE = 256


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
    return best("dense", _Job)


def serves(dtype: torch.dtype) -> bool:
    """Whether the kernel can run here, for rows of such numbers."""
    return dtype == torch.float32 and kernel() is not None


def about() -> str:
    """A line on what serves here."""
    return f"ours, {found().why}" if kernel() else f"torch's ({found().why})"


@dataclass(frozen=True)
class Dense:
    """A linear layer's weight ``[outputs, inputs]`` as the kernel wants it: ``data [strips, inputs, 32]`` of numbers,
    or ``[strips, bytes]`` of codes, zeros behind the last output."""

    data: Tensor
    inputs: int
    outputs: int
    kept: str  # one of KEPT


def size_bytes(inputs: int, outputs: int, kept: str) -> int:
    """What a weight takes."""
    bits = code_recovery.BITS.get(kept)
    strip = code_recovery.strip_bytes(inputs, bits) if bits else inputs * OUTPUTS * _dtype(kept).itemsize
    return -(-outputs // OUTPUTS) * strip


def _dtype(kept: str) -> torch.dtype:
    return getattr(torch, kept)  # type: ignore[no-any-return]


def of_bytes(memory: Tensor, inputs: int, outputs: int, kept: str) -> Dense:
    """A weight over the bytes of another one's ``data``, which are not copied."""
    if kept in code_recovery.BITS:
        return Dense(memory.view(-(-outputs // OUTPUTS), -1), inputs, outputs, kept)
    return Dense(memory.view(_dtype(kept)).view(-1, inputs, OUTPUTS), inputs, outputs, kept)


def narrowest(weight: Tensor) -> str:
    """How a float32 weight is kept in the fewest bytes without being rounded, of numbers."""
    for kept in ("bfloat16", "float16"):
        if all(torch.equal(part.to(_dtype(kept)).float(), part) for part in torch.split(weight.float(), _SLICE)):
            return kept
    return "float32"


def number(kept: str) -> torch.dtype:
    """The narrowest type of numbers that holds every number of a weight that is kept so."""
    return torch.float32 if kept in code_recovery.BITS else _dtype(kept)


def kept_of(parts: Callable[[], Iterable[Tensor]]) -> str:
    """How ``pack`` keeps a weight that is ``parts`` in a row, ``[outputs, inputs]`` each, looked at one by one."""

    def holds(kept: str, part: Tensor) -> bool:
        if kept in code_recovery.BITS:
            return code_recovery.find(part.float(), (code_recovery.BITS[kept],)) is not None
        return torch.equal(part.to(_dtype(kept)).float(), part.float())

    narrow = ("bfloat16", "float16", *code_recovery.BITS)
    return next((kept for kept in narrow if all(holds(kept, part) for part in parts())), "float32")


def pack(weight: Tensor, kept: str | None = None) -> Dense:
    """A weight ``[outputs, inputs]`` of floats, kept as ``kept`` says (one of KEPT), or in the fewest bytes that hold
    it exactly. Raises ValueError where there are no such codes."""
    outputs, inputs = weight.shape
    if kept in code_recovery.BITS:
        coded = code_recovery.find(weight.float(), (code_recovery.BITS[kept],))
        if coded is None:
            raise ValueError(
                f"a weight of {outputs} x {inputs} has numbers without a code of {code_recovery.BITS[kept]} bits"
            )
        return Dense(coded.data, inputs, outputs, kept)
    if kept is None:
        kept = narrowest(weight)
        found = code_recovery.find(weight) if kept == "float32" else None
        if found is not None:
            return Dense(found.data, inputs, outputs, f"coded{found.bits}")
    data = torch.empty(-(-outputs // OUTPUTS), inputs, OUTPUTS, dtype=_dtype(kept))
    for first in range(0, outputs, _SLICE):
        part = weight[first : first + _SLICE].to(data.dtype)
        part = F.pad(part, (0, 0, 0, -len(part) % OUTPUTS)).view(-1, OUTPUTS, inputs)
        data[first // OUTPUTS : first // OUTPUTS + len(part)] = part.transpose(1, 2)
    return Dense(data, inputs, outputs, kept)


def unpack(weight: Dense) -> Tensor:
    """The weight ``[outputs, inputs]`` in float32."""
    if weight.kept in code_recovery.BITS:
        found = code_recovery.unpack(weight.data, weight.inputs, code_recovery.BITS[weight.kept])
        return code_recovery.numbers(found)[: weight.outputs]
    return weight.data.transpose(1, 2).reshape(-1, weight.inputs)[: weight.outputs].float()


def call(x: Tensor, weight: Dense, bias: Tensor | None, y: Tensor) -> Call:
    """``product`` of contiguous ``x`` into ``y``. Raises RuntimeError without kernels."""
    serving, rows, threads = kernel(), x.shape[0], torch.get_num_threads()
    if serving is None:
        raise RuntimeError(found().why)
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
        KEPT.index(weight.kept),
    )
    return Call(serving, job, (x, weight, bias, y))


def product(x: Tensor, weight: Dense, bias: Tensor | None) -> Tensor:
    """``x [rows, inputs]`` times the weight, plus ``bias [outputs]``: ``[rows, outputs]``, all float32. Raises
    RuntimeError without kernels."""
    y = x.new_empty(x.shape[0], weight.outputs)
    call(x.contiguous(), weight, bias, y).together(torch.get_num_threads())
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
