"""BF16 GEMV over weights packed by oneDNN, at memory bandwidth.

With few input rows, oneDNN reads a weight of 1.6 to 270 MB at a half to two thirds of the memory bandwidth. This
kernel reads the memory that oneDNN packed, in one stream per thread, and computes with the same instruction
(``vdpbf16ps``) in the same order: one sum per block of input features, then the sum of the blocks, then the bias. The
block length depends on oneDNN's version and on the shape. ``find_bit_exact_gemv`` finds it by comparing bits; if no
length reproduces oneDNN's bits, oneDNN computes the product.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from kvkernels.cpu.cpu_library import Kernel, KernelCall, loaded_library

# Above this many rows the product is compute-bound, and oneDNN's blocking is as good.
MAX_ROWS = 32
_OUTPUTS = 64
# The variant with the instruction that oneDNN uses on CPUs that have it.
_VARIANT = "avx512bf16"
# Lengths of oneDNN's blocks of input features.
_BLOCKS = (512, 1024, 256, 2048)
_PROBE_ROWS = 64


class _Job(ctypes.Structure):
    """``Bf16GemvJob`` in jobs.h."""

    _fields_ = (
        ("next_item", ctypes.c_int64),
        ("parts", ctypes.c_int64),
        ("weight", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("of_floats", ctypes.c_int64),
    )


@cache
def kernel() -> Kernel | None:
    """Return the kernel; None if it cannot run or cannot reproduce oneDNN's bits."""
    needed = ("_is_mkldnn_bf16_supported", "data_ptr", "_nbytes")
    library = loaded_library().library
    if library is None or library.name != _VARIANT or not all(hasattr(torch.ops.mkldnn, name) for name in needed):
        return None
    return library.kernel("bf16_gemv", _Job)


def describe() -> str:
    """Describe the implementation in use, in one line."""
    return f"ours, C++, {_VARIANT}, with oneDNN's bits" if kernel() else f"oneDNN (ours needs {_VARIANT})"


class Bf16Gemv:
    """Product over a weight that oneDNN packed, with oneDNN's bits.

    Maps ``x [rows, in]`` to ``[rows, out]``.
    """

    def __init__(self, packed: Tensor, bias: Tensor | None, block: int, kernel: Kernel) -> None:
        self._packed, self._bias, self._block, self._kernel = packed, bias, block, kernel
        self._weight = int(torch.ops.mkldnn.data_ptr(packed))
        self._outputs, self._inputs = packed.shape

    def over(self, packed: Tensor) -> Bf16Gemv:
        """Return the product over another weight of the same shape and layout."""
        return Bf16Gemv(packed, self._bias, self._block, self._kernel)

    def call(self, x: Tensor, y: Tensor) -> KernelCall:
        """Build the call that writes the product into ``y [rows, out]``, in bfloat16 or float32.

        ``x`` is contiguous.
        """
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
            y.dtype == torch.float32,
        )
        return KernelCall(self._kernel, job, (self._packed, self._bias, x, y))

    def __call__(self, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Multiply; ``x`` is contiguous. The result is bfloat16 or float32."""
        y = x.new_empty(x.shape[0], self._outputs, dtype=dtype)
        self.call(x, y).run(torch.get_num_threads())
        return y


def find_bit_exact_gemv(packed: Tensor, bias: Tensor | None) -> Bf16Gemv | None:
    """Return a product over a packed weight ``[out, in]`` with oneDNN's bits.

    Compares bits on the calling thread; returns None if no block length reproduces oneDNN's. The first weight of a
    shape takes the time of a few products of 64 rows; further weights of that shape take none.
    """
    serving, (outputs, inputs) = kernel(), packed.shape
    if serving is None or outputs % _OUTPUTS or inputs % 2:
        return None
    if int(torch.ops.mkldnn._nbytes(packed)) != outputs * inputs * 2:
        return None
    block = _block(outputs, inputs, bias is not None, torch.get_num_threads())
    return Bf16Gemv(packed, bias, block, serving) if block else None


@cache
def _block(outputs: int, inputs: int, biased: bool, threads: int) -> int:
    """Find the block length (input features) of oneDNN's sums for a shape.

    Returns 0 if no length gives its bits. In the compared sums every product occurs with both signs, so each sum
    consists only of rounding errors, and no two orders of addition give the same bits.
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
    return next((n for n in lengths if torch.equal(Bf16Gemv(packed, bias, n, serving)(x), want)), 0)
