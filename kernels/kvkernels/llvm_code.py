"""Writes functions in LLVM's language, compiles them in this process and runs them on torch's OpenMP team.

numba brings LLVM along. The team has to be torch's own: a second one would put both to sleep between calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

try:
    import llvmlite.binding as llvm
except ImportError:  # torch's kernels serve instead
    llvm = None

AVAILABLE = llvm is not None

LANES = 16
FLOATS, WORDS = "<16 x float>", "<16 x i32>"
# AVX512-BF16: products of pairs, added up in float32; and rounding to the nearest even.
DOT, NARROW = "llvm.x86.avx512bf16.dpbf16ps.512", "llvm.x86.avx512bf16.cvtneps2bf16.512"
Value = str
Body = Callable[[Value, list[Value]], list[Value]]


def vector(element: str, values: Sequence[int | float]) -> Value:
    """A constant vector; floats are written by their bits."""
    return "<" + ", ".join(f"{element} {_constant(element, v)}" for v in values) + ">"


def floats(value: float) -> Value:
    """A constant in all lanes."""
    return vector("float", [value] * LANES)


def _constant(element: str, value: float) -> str:
    if element != "float":
        return str(value)
    # LLVM writes a float as the double of the same value.
    bits = ctypes.c_uint64.from_buffer(ctypes.c_double(ctypes.c_float(value).value)).value
    return f"0x{bits:016X}"


class Code:
    """A function's text while it is written: every method adds instructions and names their result."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._names = 0
        self._block = "entry"

    def text(self) -> str:
        return "\n".join(self._lines)

    def _name(self, prefix: str) -> str:
        self._names += 1
        return f"{prefix}{self._names}"

    def label(self, name: str) -> None:
        self._lines.append(f"{name}:")
        self._block = name

    def do(self, instruction: str) -> None:
        """An instruction without a result."""
        self._lines.append("  " + instruction)

    def get(self, instruction: str) -> Value:
        """An instruction's result."""
        name = self._name("%v")
        self.do(f"{name} = {instruction}")
        return name

    # ---- numbers and memory ---------------------------------------------------------------------------------

    def add(self, a: Value | int, b: Value | int) -> Value:
        return self.get(f"add i64 {a}, {b}")

    def sub(self, a: Value | int, b: Value | int) -> Value:
        return self.get(f"sub i64 {a}, {b}")

    def mul(self, a: Value | int, b: Value | int) -> Value:
        return self.get(f"mul i64 {a}, {b}")

    def div(self, a: Value | int, b: Value | int) -> Value:
        return self.get(f"udiv i64 {a}, {b}")

    def rest(self, a: Value | int, b: Value | int) -> Value:
        return self.get(f"urem i64 {a}, {b}")

    def compare(self, how: str, a: Value | int, b: Value | int) -> Value:
        return self.get(f"icmp {how} i64 {a}, {b}")

    def least(self, a: Value | int, b: Value | int) -> Value:
        return self.get(f"select i1 {self.compare('slt', a, b)}, i64 {a}, i64 {b}")

    def most(self, a: Value | int, b: Value | int) -> Value:
        return self.get(f"select i1 {self.compare('sgt', a, b)}, i64 {a}, i64 {b}")

    def at(self, element: str, pointer: Value, index: Value | int) -> Value:
        """The address of an element."""
        return self.get(f"getelementptr {element}, ptr {pointer}, i64 {index}")

    def load(self, kind: str, pointer: Value, align: int) -> Value:
        return self.get(f"load {kind}, ptr {pointer}, align {align}")

    def store(self, kind: str, value: Value, pointer: Value, align: int) -> None:
        self.do(f"store {kind} {value}, ptr {pointer}, align {align}")

    def call(self, result: str, function: str, *arguments: str) -> Value:
        return self.get(f"call {result} @{function}({', '.join(arguments)})")

    # ---- vectors of 16 --------------------------------------------------------------------------------------

    def float_op(self, op: str, a: Value, b: Value) -> Value:
        return self.get(f"{op} {FLOATS} {a}, {b}")

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.call(FLOATS, "llvm.fma.v16f32", f"{FLOATS} {a}", f"{FLOATS} {b}", f"{FLOATS} {c}")

    def larger(self, a: Value, b: Value) -> Value:
        above = self.get(f"fcmp ogt {FLOATS} {a}, {b}")
        return self.get(f"select <16 x i1> {above}, {FLOATS} {a}, {FLOATS} {b}")

    def smaller(self, a: Value, b: Value) -> Value:
        below = self.get(f"fcmp olt {FLOATS} {a}, {b}")
        return self.get(f"select <16 x i1> {below}, {FLOATS} {a}, {FLOATS} {b}")

    def cast(self, value: Value, source: str, target: str) -> Value:
        return value if source == target else self.get(f"bitcast {source} {value} to {target}")

    def spread(self, element: str, value: Value) -> Value:
        """A number in all lanes."""
        one = self.get(f"insertelement <16 x {element}> poison, {element} {value}, i64 0")
        return self.get(f"shufflevector <16 x {element}> {one}, <16 x {element}> poison, <16 x i32> zeroinitializer")

    def shuffle(self, kind: str, a: Value, b: Value, indices: Sequence[int]) -> Value:
        """Lanes of two vectors by number, those of ``b`` behind those of ``a``."""
        return self.get(f"shufflevector {kind} {a}, {kind} {b}, <{len(indices)} x i32> {vector('i32', list(indices))}")

    # ---- control --------------------------------------------------------------------------------------------

    def loop(
        self, first: Value | int, end: Value | int, carried: Sequence[tuple[str, Value]], body: Body
    ) -> list[Value]:
        """``body(i, values)`` for every ``i`` from ``first`` to before ``end``; it returns the next values.
        Returns the last ones."""
        before, head, inside, done = self._block, *(self._name(x) for x in ("head", "inside", "done"))
        i, values = self._name("%i"), [self._name("%c") for _ in carried]
        self.do(f"br label %{head}")
        self.label(head)
        phis = len(self._lines)
        self._lines += [""] * (1 + len(carried))
        more = self.compare("slt", i, end)
        self.do(f"br i1 {more}, label %{inside}, label %{done}")
        self.label(inside)
        found = body(i, values)
        following, latch = self.add(i, 1), self._block
        self.do(f"br label %{head}")
        self._lines[phis] = f"  {i} = phi i64 [ {first}, %{before} ], [ {following}, %{latch} ]"
        for n, ((kind, start), value, new) in enumerate(zip(carried, values, found, strict=True), phis + 1):
            self._lines[n] = f"  {value} = phi {kind} [ {start}, %{before} ], [ {new}, %{latch} ]"
        self.label(done)
        return values

    def when(
        self, condition: Value, values: Sequence[tuple[str, Value]], body: Callable[[], list[Value]]
    ) -> list[Value]:
        """What ``body`` makes of the values if the condition holds, else the values."""
        before, inside, done = self._block, self._name("then"), self._name("after")
        self.do(f"br i1 {condition}, label %{inside}, label %{done}")
        self.label(inside)
        found, last = body(), self._block
        self.do(f"br label %{done}")
        self.label(done)
        return [
            self.get(f"phi {kind} [ {old}, %{before} ], [ {new}, %{last} ]")
            for (kind, old), new in zip(values, found, strict=True)
        ]

    def fields(self, job: type[ctypes.Structure]) -> dict[str, Value]:
        """The fields of the structure at ``%job``, all of 8 bytes."""
        found = {}
        for n, field in enumerate(job._fields_):
            kind = "ptr" if field[1] is ctypes.c_void_p else "i64"
            found[field[0]] = self.load(kind, self.at("i64", "%job", n), 8)
        return found


class Function:
    """Compiled code; it goes when this does."""

    def __init__(self, text: str, name: str) -> None:
        """Raises RuntimeError when LLVM does not take the text."""
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
        )
        module = llvm.parse_assembly(text)
        module.verify()
        self._engine = llvm.create_mcjit_compiler(module, target)
        self._engine.finalize_object()
        address = self._engine.get_function_address(name)
        self.address = ctypes.c_void_p(address)
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


@cache
def openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch brings along, where it is GNU's."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        with contextlib.suppress(OSError):
            found = ctypes.CDLL(str(path))
            found.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            found.GOMP_parallel.restype = None
            return found
    return None


def run(function: Function, job: ctypes.Structure, threads: int) -> None:
    """The function, once on each of so many threads: torch's, or where they cannot be had, some of our own. Releases
    the GIL."""
    library = openmp()
    if library is not None:
        library.GOMP_parallel(function.address, ctypes.addressof(job), threads, 0)
        return
    others = [_own_threads().submit(function.call, ctypes.addressof(job)) for _ in range(threads - 1)]
    function.call(ctypes.addressof(job))
    for other in others:
        other.result()


@cache
def _own_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), "kv-attention")


@cache
def cpu_has(feature: str) -> bool:
    """Whether this CPU has an instruction set, by LLVM's name, and LLVM is there to use it."""
    return llvm is not None and bool(llvm.get_host_cpu_features().get(feature))
