"""Products of few rows with a large bfloat16 weight, at the speed of memory.

oneDNN reads a weight of 1.6 to 270 MB at a half to two thirds of what memory gives when the input has four rows. This
kernel reads the very memory that oneDNN packed, in one stream per thread, and computes with the same instruction
(``vdpbf16ps``) in the same order: a sum per block of input features, the blocks' sums added up, then the bias. How long
a block is depends on oneDNN's version and the shape; ``streamed`` finds out by comparing bits, and where no length
gives oneDNN's bits, oneDNN goes on serving.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial

import torch
from torch import Tensor

from kvkernels.llvm_code import DOT, FLOATS, LANES, NARROW, WORDS, Code, Function, Value, cpu_has, run, vector

# Rows are computed four at a time: with 64 outputs they fill half of the 32 vector registers.
ROWS = 4
# Above this many rows there is as much to compute as to read, and oneDNN's blocking is as good.
MOST_ROWS = 32
_OUTPUTS, _PARTS = 64, 4
# Lengths of oneDNN's blocks of input features.
_BLOCKS = (512, 1024, 256, 2048)
_PROBE_ROWS = 64
# With fewer strips of 64 outputs to a thread, threads would wait for each other.
_LEAST_STRIPS = 2


class _Job(ctypes.Structure):
    _fields_ = (
        ("taken", ctypes.c_int64),  # parts of the outputs that a thread has taken
        ("parts", ctypes.c_int64),  # as many as there are threads; a late one finds its part taken
        ("weight", ctypes.c_void_p),  # [out / 64, in / 2, 64, 2] bfloat16
        ("x", ctypes.c_void_p),  # [rows, in] bfloat16
        ("bias", ctypes.c_void_p),  # [out] bfloat16, or null
        ("y", ctypes.c_void_p),  # [rows, out] bfloat16
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("rows", ctypes.c_int64),
    )


class _Kernel:
    """Writes the kernel: a thread takes a share of the strips of 64 outputs, and computes each for four rows at a time,
    their sums in registers. A word is two bfloat16 numbers."""

    def __init__(self) -> None:
        self.c = Code()

    def text(self) -> str:
        """A function ``product(job)`` for every thread of a team."""
        c = self.c
        self.job = c.fields(_Job)
        self.words = c.div(self.job["inputs"], 2)
        strips, parts = c.div(self.job["outputs"], _OUTPUTS), self.job["parts"]
        c.do("br label %next")
        c.label("next")
        part = c.get("atomicrmw add ptr %job, i64 1 monotonic, align 8")
        c.do(f"br i1 {c.compare('slt', part, parts)}, label %work, label %exit")
        c.label("work")
        first, end = (c.div(c.mul(strips, n), parts) for n in (part, c.add(part, 1)))
        c.loop(first, end, [], self._strip)
        c.do("br label %next")
        c.label("exit")
        c.do("ret void")
        return f"""
declare <16 x float> @{DOT}(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare <16 x bfloat> @{NARROW}(<16 x float>)

define void @product(ptr %job) {{
entry:
{c.text()}
}}
"""

    def _strip(self, strip: Value, _: list[Value]) -> list[Value]:
        c = self.c
        self.column = c.mul(strip, _OUTPUTS)
        self.weight = c.at("i32", self.job["weight"], c.mul(self.column, self.words))
        c.loop(0, c.div(self.job["rows"], ROWS), [], self._rows)
        return []

    def _rows(self, group: Value, _: list[Value]) -> list[Value]:
        c, job = self.c, self.job
        rows = [c.add(c.mul(group, ROWS), n) for n in range(ROWS)]
        lines = [c.at("i32", job["x"], c.mul(row, self.words)) for row in rows]
        count, zeros = ROWS * _PARTS, [(FLOATS, "zeroinitializer")] * (ROWS * _PARTS)

        def block(n: Value, totals: list[Value]) -> list[Value]:
            first = c.mul(n, job["block"])
            end = c.least(c.add(first, job["block"]), job["inputs"])
            sums = c.loop(c.div(first, 2), c.div(end, 2), zeros, partial(self._word, lines))
            return [c.float_op("fadd", totals[i], sums[i]) for i in range(count)]

        blocks = c.div(c.sub(c.add(job["inputs"], job["block"]), 1), job["block"])
        totals = c.loop(0, blocks, zeros, block)
        biased = c.get(f"icmp ne ptr {job['bias']}, null")
        totals = c.when(biased, [(FLOATS, t) for t in totals], partial(self._biased, totals))
        for i, total in enumerate(totals):
            at = c.add(c.add(c.mul(rows[i // _PARTS], job["outputs"]), self.column), i % _PARTS * LANES)
            narrow = c.call("<16 x bfloat>", NARROW, f"{FLOATS} {total}")
            c.store("<16 x bfloat>", narrow, c.at("bfloat", job["y"], at), 2)
        return []

    def _word(self, lines: list[Value], word: Value, sums: list[Value]) -> list[Value]:
        c, kind = self.c, "<32 x bfloat>"
        at = c.at("i32", self.weight, c.mul(word, _OUTPUTS))
        weights = [c.load(kind, c.at("i32", at, n * LANES), 64) for n in range(_PARTS)]
        numbers = [c.spread("i32", c.load("i32", c.at("i32", line, word), 4)) for line in lines]
        inputs = [c.cast(number, WORDS, kind) for number in numbers]
        return [
            c.call(FLOATS, DOT, f"{FLOATS} {total}", f"{kind} {weights[i % _PARTS]}", f"{kind} {inputs[i // _PARTS]}")
            for i, total in enumerate(sums)
        ]

    def _biased(self, totals: list[Value]) -> list[Value]:
        c, kind = self.c, "<16 x i16>"
        biases = []
        for n in range(_PARTS):
            at = c.at("i16", self.job["bias"], c.add(self.column, n * LANES))
            wide = c.get(f"zext {kind} {c.load(kind, at, 2)} to {WORDS}")
            biases.append(c.cast(c.get(f"shl {WORDS} {wide}, {vector('i32', [16] * LANES)}"), WORDS, FLOATS))
        return [c.float_op("fadd", total, biases[i % _PARTS]) for i, total in enumerate(totals)]


@cache
def _compiled() -> Function | None:
    """The kernel, or None where it cannot run."""
    needed = ("_is_mkldnn_bf16_supported", "data_ptr", "_nbytes")
    if not all(hasattr(torch.ops.mkldnn, name) for name in needed):
        return None
    return Function(_Kernel().text(), "product") if cpu_has("avx512bf16") else None


class StreamedProduct:
    """``x [rows, in]`` to ``[rows, out]`` over a weight that oneDNN packed, with oneDNN's bits."""

    def __init__(self, packed: Tensor, bias: Tensor | None, block: int, kernel: Function) -> None:
        self._packed, self._bias, self._block, self._kernel = packed, bias, block, kernel
        self._weight = int(torch.ops.mkldnn.data_ptr(packed))
        self._outputs, self._inputs = packed.shape

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` is contiguous, its rows a multiple of ROWS."""
        rows, threads = x.shape[0], torch.get_num_threads()
        y = x.new_empty(rows, self._outputs)
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
        run(self._kernel, job, threads)
        return y


def streamed(packed: Tensor, bias: Tensor | None) -> StreamedProduct | None:
    """The product over a packed weight ``[out, in]`` that gives oneDNN's bits on this thread; None where there is none.

    The first weight of a shape takes as long as a few products of 64 rows, the others take nothing.
    """
    kernel, (outputs, inputs) = _compiled(), packed.shape
    threads = torch.get_num_threads()
    if kernel is None or outputs % _OUTPUTS or outputs // _OUTPUTS < _LEAST_STRIPS * threads or inputs % 2:
        return None
    if int(torch.ops.mkldnn._nbytes(packed)) != outputs * inputs * 2:
        return None
    block = _block(outputs, inputs, bias is not None, threads)
    return StreamedProduct(packed, bias, block, kernel) if block else None


@cache
def _block(outputs: int, inputs: int, biased: bool, threads: int) -> int:
    """How many input features oneDNN sums up at a time for weights of a shape; 0 when no length gives its bits.

    In the sums that are compared every product occurs with both signs, so that what they add up to is their rounding
    errors alone, and no two orders give the same.
    """
    kernel = _compiled()
    assert kernel is not None
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
    return next((n for n in lengths if torch.equal(StreamedProduct(packed, bias, n, kernel)(x), want)), 0)
