"""Float32 GEMM over weights stored in 16, 8 or 4 bits on the CPU.

It supports any number of rows. Memory bandwidth limits decoding. So a weight keeps the width of its checkpoint, 16 bits
or the codes of a checkpoint that was quantized to 4 or 8 bits (``kvkernels.cpu.code_recovery``), and is widened in
registers to exactly the same float32 values. CPUs without 16-bit arithmetic compute the float32 products as fast as
they read the weight. A row's bits depend neither on other rows nor on threads nor on the instruction set; ``reference``
gives the same bits. Memory layout: ``kernels/cpu/f32_gemm.cpp``.
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
from kvkernels.cpu.cpu_library import Kernel, KernelCall, load_kernel, loaded_library

# Outputs per strip.
OUTPUTS = code_recovery.OUTPUTS
# Inputs whose products are summed before the partial sums are added.
BLOCK = 128
# Element formats of packed weights, in the order of the constants in jobs.h.
STORAGE_FORMATS = ("float32", "bfloat16", "float16", "coded4", "coded8")
# With more parts than threads, other threads take over parts of a delayed thread. More parts cost more transpositions
# of many rows: one per part.
_PARTS_PER_THREAD = 4
_MANY_ROWS = 97
# Outputs transposed at a time, which bounds the temporary memory.
_SLICE = 256


class _Job(ctypes.Structure):
    """``F32GemmJob`` in jobs.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("next_item", "parts")),
        *((name, ctypes.c_void_p) for name in ("weight", "x", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "inputs", "outputs", "storage")),
    )


@cache
def kernel() -> Kernel | None:
    """Return the kernel; None if no variant runs."""
    return load_kernel("f32_gemm", _Job)


def serves(dtype: torch.dtype) -> bool:
    """Return True if the kernel runs on this machine for rows of this dtype."""
    return dtype == torch.float32 and kernel() is not None


def describe() -> str:
    """Describe the implementation in use, in one line."""
    return f"ours, {loaded_library().why}" if kernel() else f"torch's ({loaded_library().why})"


@dataclass(frozen=True)
class DenseWeight:
    """Weight ``[outputs, inputs]`` of a linear layer in the kernel's layout.

    ``data`` is ``[strips, inputs, 32]`` of values, or ``[strips, bytes]`` of codes, zero-padded after the last output.
    """

    data: Tensor
    inputs: int
    outputs: int
    storage: str  # one of STORAGE_FORMATS


def size_bytes(inputs: int, outputs: int, storage: str) -> int:
    """Return the packed size of a weight in bytes."""
    bits = code_recovery.BITS.get(storage)
    strip = code_recovery.strip_bytes(inputs, bits) if bits else inputs * OUTPUTS * _dtype(storage).itemsize
    return -(-outputs // OUTPUTS) * strip


def _dtype(storage: str) -> torch.dtype:
    return getattr(torch, storage)  # type: ignore[no-any-return]


def of_bytes(memory: Tensor, inputs: int, outputs: int, storage: str) -> DenseWeight:
    """Create a weight over the bytes of another weight's ``data``, without a copy."""
    if storage in code_recovery.BITS:
        return DenseWeight(memory.view(-(-outputs // OUTPUTS), -1), inputs, outputs, storage)
    return DenseWeight(memory.view(_dtype(storage)).view(-1, inputs, OUTPUTS), inputs, outputs, storage)


def narrowest_storage(weight: Tensor) -> str:
    """Return the narrowest element type that holds a float32 weight without rounding."""
    for storage in ("bfloat16", "float16"):
        if all(torch.equal(part.to(_dtype(storage)).float(), part) for part in torch.split(weight.float(), _SLICE)):
            return storage
    return "float32"


def value_dtype(storage: str) -> torch.dtype:
    """Return the narrowest dtype that holds every value of a weight with this storage format."""
    return torch.float32 if storage in code_recovery.BITS else _dtype(storage)


def storage_of(parts: Callable[[], Iterable[Tensor]]) -> str:
    """Return the storage format that ``pack`` chooses for the concatenation of ``parts``.

    Each part is ``[outputs, inputs]``; parts are examined one at a time.
    """

    def holds(storage: str, part: Tensor) -> bool:
        if storage in code_recovery.BITS:
            return code_recovery.recover_codes(part.float(), (code_recovery.BITS[storage],)) is not None
        return torch.equal(part.to(_dtype(storage)).float(), part.float())

    narrow = ("bfloat16", "float16", *code_recovery.BITS)
    return next((storage for storage in narrow if all(holds(storage, part) for part in parts())), "float32")


def pack(weight: Tensor, storage: str | None = None) -> DenseWeight:
    """Pack a weight ``[outputs, inputs]`` of floats as ``storage``, or in the fewest bytes.

    ``storage`` is one of STORAGE_FORMATS. The packed weight is exact. Raises ValueError if ``storage`` is a code format
    and a value has no code.
    """
    outputs, inputs = weight.shape
    if storage in code_recovery.BITS:
        coded = code_recovery.recover_codes(weight.float(), (code_recovery.BITS[storage],))
        if coded is None:
            raise ValueError(
                f"a weight of {outputs} x {inputs} has numbers without a code of {code_recovery.BITS[storage]} bits"
            )
        return DenseWeight(coded.data, inputs, outputs, storage)
    if storage is None:
        storage = narrowest_storage(weight)
        recovered = code_recovery.recover_codes(weight) if storage == "float32" else None
        if recovered is not None:
            return DenseWeight(recovered.data, inputs, outputs, f"coded{recovered.bits}")
    data = torch.empty(-(-outputs // OUTPUTS), inputs, OUTPUTS, dtype=_dtype(storage))
    for first in range(0, outputs, _SLICE):
        part = weight[first : first + _SLICE].to(data.dtype)
        part = F.pad(part, (0, 0, 0, -len(part) % OUTPUTS)).view(-1, OUTPUTS, inputs)
        data[first // OUTPUTS : first // OUTPUTS + len(part)] = part.transpose(1, 2)
    return DenseWeight(data, inputs, outputs, storage)


def unpack(weight: DenseWeight) -> Tensor:
    """Return the weight ``[outputs, inputs]`` in float32."""
    if weight.storage in code_recovery.BITS:
        recovered = code_recovery.unpack(weight.data, weight.inputs, code_recovery.BITS[weight.storage])
        return code_recovery.dequantize(recovered)[: weight.outputs]
    return weight.data.transpose(1, 2).reshape(-1, weight.inputs)[: weight.outputs].float()


def gemm_call(x: Tensor, weight: DenseWeight, bias: Tensor | None, y: Tensor) -> KernelCall:
    """Build the call that computes ``gemm`` of contiguous ``x`` into ``y``.

    Raises RuntimeError without kernels.
    """
    serving, rows, threads = kernel(), x.shape[0], torch.get_num_threads()
    if serving is None:
        raise RuntimeError(loaded_library().why)
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
        STORAGE_FORMATS.index(weight.storage),
    )
    return KernelCall(serving, job, (x, weight, bias, y))


def gemm(x: Tensor, weight: DenseWeight, bias: Tensor | None) -> Tensor:
    """Multiply ``x [rows, inputs]`` by the weight and add ``bias [outputs]``.

    The result is ``[rows, outputs]``; all are float32. Raises RuntimeError without kernels.
    """
    y = x.new_empty(x.shape[0], weight.outputs)
    gemm_call(x.contiguous(), weight, bias, y).run(torch.get_num_threads())
    return y


def reference(x: Tensor, weight: DenseWeight, bias: Tensor | None) -> Tensor:
    """Compute ``gemm`` in plain torch, with the same bits: the test oracle."""
    numbers, dense = x.double(), unpack(weight).double()
    total = torch.zeros(len(x), weight.outputs)
    for first in range(0, weight.inputs, BLOCK):
        block = torch.zeros(len(x), weight.outputs)
        for i in range(first, min(first + BLOCK, weight.inputs)):
            block = (block.double() + numbers[:, i, None] * dense[None, :, i]).float()
        total = total + block if first else block
    return total if bias is None else total + bias
