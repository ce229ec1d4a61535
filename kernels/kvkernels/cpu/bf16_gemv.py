"""Products of few rows with a large bfloat16 weight, at the speed of memory.

oneDNN reads a weight of 1.6 to 270 MB at a half to two thirds of what memory gives when the input has four rows. This
kernel reads the very memory that oneDNN packed, in one stream per thread, and computes with the same instruction
(``vdpbf16ps``) in the same order: a sum per block of input features, the blocks' sums added up, then the bias. How long
a block is depends on oneDNN's version and the shape; ``streamed`` finds out by comparing bits, and where no length
gives oneDNN's bits, oneDNN goes on serving.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from kvkernels.cpu.cpu_library import Call, Kernel, found

# Rows are computed four at a time.
ROWS = 4
# Above this many rows there is as much to compute as to read, and oneDNN's blocking is as good.
MOST_ROWS = 32
_OUTPUTS = 64
# What oneDNN computes with on a CPU that has it.
_VARIANT = "avx512bf16"
# Lengths of oneDNN's blocks of input features.
_BLOCKS = (512, 1024, 256, 2048)
_PROBE_ROWS = 64
# With fewer strips of 64 outputs to a thread, threads would wait for each other.
_LEAST_STRIPS = 2


class _Job(ctypes.Structure):
    """``Job`` in products.cpp."""

    _fields_ = (
        ("taken", ctypes.c_int64),
        ("parts", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("rows", ctypes.c_int64),
    )


@cache
def kernel() -> Kernel | None:
    """The kernel, or None where it cannot run or has no chance to be oneDNN's equal."""
    needed = ("_is_mkldnn_bf16_supported", "data_ptr", "_nbytes")
    library = found().library
    if library is None or library.name != _VARIANT or not all(hasattr(torch.ops.mkldnn, name) for name in needed):
        return None
    return library.kernel("product", _Job)


def about() -> str:
    """A line on what serves here."""
    return f"ours, C++, {_VARIANT}, with oneDNN's bits" if kernel() else f"oneDNN (ours needs {_VARIANT})"


class StreamedProduct:
    """``x [rows, in]`` to ``[rows, out]`` over a weight that oneDNN packed, with oneDNN's bits."""

    def __init__(self, packed: Tensor, bias: Tensor | None, block: int, kernel: Kernel) -> None:
        self._packed, self._bias, self._block, self._kernel = packed, bias, block, kernel
        self._weight = int(torch.ops.mkldnn.data_ptr(packed))
        self._outputs, self._inputs = packed.shape

    def over(self, packed: Tensor) -> StreamedProduct:
        """The same over another weight of the same shape and layout."""
        return StreamedProduct(packed, self._bias, self._block, self._kernel)

    def call(self, x: Tensor, y: Tensor) -> Call:
        """The product of ``x``, contiguous, its rows a multiple of ROWS, into ``y``."""
        rows, threads = x.shape[0], torch.get_num_threads()
        job = _Job(
            0,
            threads,
            self._weight,
            x.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            y.data_ptr(),
            self._inputs,
            self._outputs,
            self._block,
            rows,
        )
        return Call(self._kernel, job, (self._packed, self._bias, x, y), rounded=ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` is contiguous, its rows a multiple of ROWS."""
        y = x.new_empty(x.shape[0], self._outputs)
        self.call(x, y).together(torch.get_num_threads())
        return y


def streamed(packed: Tensor, bias: Tensor | None) -> StreamedProduct | None:
    """The product over a packed weight ``[out, in]`` that gives oneDNN's bits on this thread; None where there is none.

    The first weight of a shape takes as long as a few products of 64 rows, the others take nothing.
    """
    serving, (outputs, inputs) = kernel(), packed.shape
    threads = torch.get_num_threads()
    if serving is None or outputs % _OUTPUTS or outputs // _OUTPUTS < _LEAST_STRIPS * threads or inputs % 2:
        return None
    if int(torch.ops.mkldnn._nbytes(packed)) != outputs * inputs * 2:
        return None
    block = _block(outputs, inputs, bias is not None, threads)
    return StreamedProduct(packed, bias, block, serving) if block else None


@cache
def _block(outputs: int, inputs: int, biased: bool, threads: int) -> int:
    """How many input features oneDNN sums up at a time for weights of a shape; 0 when no length gives its bits.

    In the sums that are compared every product occurs with both signs, so that what they add up to is their rounding
    errors alone, and no two orders give the same.
    """
    serving = kernel()
    assert serving is not None
    random = torch.Generator().manual_seed(inputs)
    order = torch.randperm(inputs, generator=random)
    one, other = order[: inputs // 2], order[inputs // 2 :]
    weight, x = torch.empty(_OUTPUTS, inputs), torch.empty(_PROBE_ROWS, inputs)
    weight[:, one] = weight[:, other] = torch.randn(_OUTPUTS, inputs // 2, generator=random)
    x[:, one] = torch.randn(_PROBE_ROWS, inputs // 2, generator=random)
    x[:, other] = -x[:, one]
    weight, x = weight.bfloat16().repeat(outputs // _OUTPUTS, 1), x.bfloat16()
    bias = torch.full((outputs,), 1e-6).bfloat16() if biased else None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    want = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    lengths = sorted({min(length, inputs) for length in (*_BLOCKS, inputs)})
    return next((n for n in lengths if torch.equal(StreamedProduct(packed, bias, n, serving)(x), want)), 0)
