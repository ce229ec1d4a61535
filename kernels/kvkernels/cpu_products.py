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

from kvkernels.llvm_code import Function, cpu_has, run

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
    """What the kernel is called with; ``_kernel`` reads it by field number."""

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


def _each(template: str) -> str:
    """The template's lines for every row ``{r}`` and every 16 outputs ``{j}``."""
    return "\n".join(template.format(r=r, j=j) for r in range(ROWS) for j in range(_PARTS))


def _lines(count: int, template: str) -> str:
    """The template's lines for every number ``{n}`` below ``count``."""
    return "\n".join(template.format(n=n) for n in range(count))


_DOT = "@llvm.x86.avx512bf16.dpbf16ps.512"
_NARROW = "@llvm.x86.avx512bf16.cvtneps2bf16.512"


def _kernel() -> str:
    """The kernel in LLVM's language: a thread takes a share of the strips of 64 outputs, and computes each for four
    rows at a time, their sums in registers."""
    fields = "\n".join(
        f"""  %{name}.at = getelementptr i64, ptr %job, i64 {i}
  %{name} = load {"ptr" if kind is ctypes.c_void_p else "i64"}, ptr %{name}.at"""
        for i, (name, kind) in enumerate(_Job._fields_)
    )
    columns = _lines(_PARTS, "  %offset{n} = mul i64 16, {n}\n  %column{n} = add i64 %column, %offset{n}")
    load_weights = _lines(
        _PARTS,
        """  %w{n}.at = getelementptr <32 x bfloat>, ptr %w, i64 {n}
  %w{n} = load <32 x bfloat>, ptr %w{n}.at, align 64""",
    )
    load_inputs = _lines(
        ROWS,
        """  %x{n}.row = mul i64 %inputs, {n}
  %x{n}.i = add i64 %x{n}.row, %k
  %x{n}.at = getelementptr bfloat, ptr %xg, i64 %x{n}.i
  %x{n}.pair = load i32, ptr %x{n}.at, align 4
  %x{n}.one = insertelement <16 x i32> poison, i32 %x{n}.pair, i64 0
  %x{n}.all = shufflevector <16 x i32> %x{n}.one, <16 x i32> poison, <16 x i32> zeroinitializer
  %x{n} = bitcast <16 x i32> %x{n}.all to <32 x bfloat>""",
    )
    load_bias = _lines(
        _PARTS,
        """  %b{n}.at = getelementptr bfloat, ptr %bias, i64 %column{n}
  %b{n}.bits = load <16 x i16>, ptr %b{n}.at, align 2
  %b{n}.wide = zext <16 x i16> %b{n}.bits to <16 x i32>
  %b{n}.high = shl <16 x i32> %b{n}.wide, <SIXTEENS>
  %b{n} = bitcast <16 x i32> %b{n}.high to <16 x float>""".replace("SIXTEENS", ", ".join(["i32 16"] * 16)),
    )
    multiply = _each(
        "  %dot{r}{j} = call <16 x float> "
        + _DOT
        + "(<16 x float> %acc{r}{j}, <32 x bfloat> %w{j}, <32 x bfloat> %x{r})"
    )
    store = _each(
        """  %y{r}{j}.r = add i64 %row, {r}
  %y{r}{j}.row = mul i64 %y{r}{j}.r, %outputs
  %y{r}{j}.i = add i64 %y{r}{j}.row, %column{j}
  %y{r}{j}.at = getelementptr bfloat, ptr %y, i64 %y{r}{j}.i
  %y{r}{j} = call <16 x bfloat> """
        + _NARROW
        + """(<16 x float> %out{r}{j})
  store <16 x bfloat> %y{r}{j}, ptr %y{r}{j}.at, align 2"""
    )
    totals = _each("  %total{r}{j} = phi <16 x float> [ zeroinitializer, %group.body ], [ %sum{r}{j}, %block.end ]")
    sums = _each("  %acc{r}{j} = phi <16 x float> [ zeroinitializer, %block.body ], [ %dot{r}{j}, %pair ]")
    add_block = _each("  %sum{r}{j} = fadd <16 x float> %total{r}{j}, %dot{r}{j}")
    add_bias = _each("  %biased{r}{j} = fadd <16 x float> %total{r}{j}, %b{j}")
    results = _each("  %out{r}{j} = phi <16 x float> [ %total{r}{j}, %group.sums ], [ %biased{r}{j}, %group.bias ]")
    return f"""
declare <16 x float> {_DOT}(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare <16 x bfloat> {_NARROW}(<16 x float>)

define void @product(ptr %job) {{
entry:
{fields}
  %strips = lshr i64 %outputs, 6
  br label %part.head

part.head:
  %part = atomicrmw add ptr %job, i64 1 monotonic, align 8
  %part.more = icmp ult i64 %part, %parts
  br i1 %part.more, label %part.body, label %exit

part.body:
  %from = mul i64 %strips, %part
  %first = udiv i64 %from, %parts
  %next = add i64 %part, 1
  %to = mul i64 %strips, %next
  %end = udiv i64 %to, %parts
  br label %strip.head

strip.head:
  %strip = phi i64 [ %first, %part.body ], [ %strip.next, %strip.end ]
  %strip.more = icmp ult i64 %strip, %end
  br i1 %strip.more, label %strip.body, label %part.head

strip.body:
  %column = shl i64 %strip, 6
{columns}
  %strip.size = mul i64 %column, %inputs
  %strip.at = getelementptr bfloat, ptr %weight, i64 %strip.size
  br label %group.head

group.head:
  %row = phi i64 [ 0, %strip.body ], [ %row.next, %group.end ]
  %row.more = icmp ult i64 %row, %rows
  br i1 %row.more, label %group.body, label %strip.end

group.body:
  %xg.at = mul i64 %row, %inputs
  %xg = getelementptr bfloat, ptr %x, i64 %xg.at
  br label %block.head

block.head:
  %begin = phi i64 [ 0, %group.body ], [ %stop, %block.end ]
{totals}
  %block.more = icmp ult i64 %begin, %inputs
  br i1 %block.more, label %block.body, label %group.sums

block.body:
  %full = add i64 %begin, %block
  %fits = icmp ult i64 %full, %inputs
  %stop = select i1 %fits, i64 %full, i64 %inputs
  br label %pair

pair:
  %k = phi i64 [ %begin, %block.body ], [ %k.next, %pair ]
{sums}
  %w.at = mul i64 %k, {_OUTPUTS}
  %w = getelementptr bfloat, ptr %strip.at, i64 %w.at
{load_weights}
{load_inputs}
{multiply}
  %k.next = add i64 %k, 2
  %pair.more = icmp ult i64 %k.next, %stop
  br i1 %pair.more, label %pair, label %block.end

block.end:
{add_block}
  br label %block.head

group.sums:
  %unbiased = icmp eq ptr %bias, null
  br i1 %unbiased, label %group.end, label %group.bias

group.bias:
{load_bias}
{add_bias}
  br label %group.end

group.end:
{results}
{store}
  %row.next = add i64 %row, {ROWS}
  br label %group.head

strip.end:
  %strip.next = add i64 %strip, 1
  br label %strip.head

exit:
  ret void
}}
"""


@cache
def _compiled() -> Function | None:
    """The kernel, or None where it cannot run."""
    needed = ("_is_mkldnn_bf16_supported", "data_ptr", "_nbytes")
    if not all(hasattr(torch.ops.mkldnn, name) for name in needed):
        return None
    return Function(_kernel(), "product") if cpu_has("avx512bf16") else None


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
