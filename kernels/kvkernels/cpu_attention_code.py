"""The text of the CPU's attention kernel; ``cpu_attention`` says what it computes and runs it.

A block's keys and values are first rearranged so that one instruction works on 16 keys, or 16 dimensions, at a time.
Four query rows then share each load; the heads that share a key head count as rows. bfloat16 is multiplied in pairs
(``vdpbf16ps``), with sums in float32, and probabilities are rounded to bfloat16, as torch's kernel and the CUDA ones
do; float32 stays float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvkernels.llvm_code import DOT, FLOATS, LANES, NARROW, WORDS, Code, Value, floats, vector

# Tokens of a page, and keys of a block.
PAGE, KEYS = 32, 64
# Rows times heads that share the rearranged keys: what they keep of their sums should stay in the L2 cache.
TILE = 256
PARTS = KEYS // LANES
_ROWS = 4
_MASKED, _LEAST = -1e30, -1e29
# 2 ** x for |x| <= 1/2, from Cephes' exp2f.
_EXP2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2,
         2.402264791363012e-1, 6.931472028550421e-1, 1.0)  # fmt: skip
_SIXTEENS = vector("i32", [16] * LANES)
_RINT, _MAX, _SUM = "llvm.rint.v16f32", "llvm.vector.reduce.fmax.v16f32", "llvm.vector.reduce.fadd.v16f32"


class Job(ctypes.Structure):
    _fields_ = (
        ("left", ctypes.c_int64),  # items of work that no thread has taken yet
        ("joined", ctypes.c_int64),  # threads that have begun
        ("query", ctypes.c_void_p),  # [rows, heads, dim]
        ("keys", ctypes.c_void_p),  # [kv_heads, slots, dim]
        ("values", ctypes.c_void_p),  # [kv_heads, slots, dim]
        ("out", ctypes.c_void_p),  # [rows, heads, dim]
        ("positions", ctypes.c_void_p),  # int64 [rows]
        ("pages", ctypes.c_void_p),  # int64: first slots of the sequences' pages
        ("tiles", ctypes.c_void_p),  # int64 [tiles, 3]: first row, rows, where its sequence's pages begin
        ("scratch", ctypes.c_void_p),  # bytes [threads, scratch_size], at a multiple of 64
        ("scratch_size", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_size", ctypes.c_int64),  # elements from one key head to the next
        ("window", ctypes.c_int64),  # keys that a row sees, or more than there are
        ("scale", ctypes.c_int64),  # of scores, as float bits; with a cap, what the score is multiplied with inside it
        ("cap", ctypes.c_int64),  # float bits
        ("looks", ctypes.c_void_p),  # float32 [tiles, heads, look_size] of zeros, or null
        ("look_size", ctypes.c_int64),  # keys to the end of the last block
    )


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for. Sizes are in words of 32 bits: two bfloat16 numbers or one float32."""

    brain: bool
    dim: int
    per_kv: int
    capped: bool
    pairs: bool  # the CPU multiplies and narrows bfloat16 itself
    parts: int  # vectors of 16 sums for each of four rows that registers hold

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return 2 if self.brain else 4

    @property
    def words(self) -> int:
        """Of a row of keys."""
        return self.dim * self.size // 4

    @property
    def key_words(self) -> int:
        """Of a row of probabilities."""
        return KEYS * self.size // 4

    @property
    def groups(self) -> int:
        """Most groups of rows in a tile."""
        return -(-max(TILE, self.per_kv) // _ROWS)

    def kept(self) -> dict[str, int]:
        """Bytes of what a thread keeps: keys, values and probabilities of a block; sums, maxima of a tile's rows."""
        rows = self.groups * _ROWS
        return {
            "k": KEYS * self.words * 4,
            "v": self.key_words * self.dim * 4,
            "p": _ROWS * self.key_words * 4,
            "o": rows * self.dim * 4,
            "l": rows * LANES * 4,
            "m": rows * LANES * 4,
        }


@dataclass
class _Row:
    """One of the four rows of a group, in a kernel's text."""

    at: Value  # its number among the tile's rows and heads
    position: Value  # in all lanes, as 32 bits
    unseen: Value  # the last key that is too old for it, likewise
    query: Value
    head: Value  # among those that share the key head


class Kernel:
    """Writes the kernel of a shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.c = shape, Code()

    def text(self) -> str:
        """A function ``attend(job)`` for every thread of a team."""
        c = self.c
        self.job = c.fields(Job)
        number = c.get(f"atomicrmw add ptr {c.at('i64', '%job', 1)}, i64 1 monotonic, align 8")
        mine = c.mul(number, self.job["scratch_size"])
        base = c.at("i8", self.job["scratch"], mine)
        self.scratch, start = {}, 0
        for name, size in self.shape.kept().items():
            self.scratch[name] = c.at("i8", base, start)
            start += size
        self.scale, self.cap = (
            c.spread("float", c.get(f"bitcast i32 {c.get(f'trunc i64 {self.job[name]} to i32')} to float"))
            for name in ("scale", "cap")
        )
        c.do("br label %next")
        c.label("next")
        left = c.get("atomicrmw sub ptr %job, i64 1 monotonic, align 8")
        item = c.sub(left, 1)
        c.do(f"br i1 {c.compare('sge', item, 0)}, label %work, label %exit")
        c.label("work")
        self._tile(item)
        c.do("br label %next")
        c.label("exit")
        c.do("ret void")
        paired = f"""
declare <16 x float> @{DOT}(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare <16 x bfloat> @{NARROW}(<16 x float>)
"""
        return f"""
{paired if self.shape.pairs else ""}
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare <16 x float> @{_RINT}(<16 x float>)
declare float @{_MAX}(<16 x float>)
declare float @{_SUM}(float, <16 x float>)

define void @attend(ptr %job) {{
entry:
{c.text()}
}}
"""

    # ---- a tile: some rows of a sequence, one key head ----------------------------------------------------------

    def _tile(self, item: Value) -> None:
        c, shape, job = self.c, self.shape, self.job
        tile, self.head = c.div(item, job["kv_heads"]), c.rest(item, job["kv_heads"])
        record = c.at("i64", job["tiles"], c.mul(tile, 3))
        self.first_row, rows, pages = (c.load("i64", c.at("i64", record, n), 8) for n in range(3))
        self.pages = c.at("i64", job["pages"], pages)
        self.last = c.sub(c.mul(rows, shape.per_kv), 1)
        first, last = self._position("0"), self._position(c.sub(rows, 1))
        groups = c.add(c.div(self.last, _ROWS), 1)
        self._clear(c.mul(groups, _ROWS))
        oldest = c.most(c.sub(c.add(first, 1), job["window"]), 0)
        first_block, end = c.div(oldest, KEYS), c.add(c.div(last, KEYS), 1)
        c.loop(first_block, end, [], partial(self._block, groups))
        c.loop(0, groups, [], self._finish)

        def look() -> list[Value]:
            heads = c.mul(c.add(c.mul(tile, job["kv_heads"]), self.head), shape.per_kv)
            self.looks = c.at("float", job["looks"], c.mul(heads, job["look_size"]))
            c.loop(first_block, end, [], partial(self._look_at, groups))
            return []

        c.when(c.get(f"icmp ne ptr {job['looks']}, null"), [], look)

    def _position(self, row: Value) -> Value:
        """Of a tile's row."""
        c = self.c
        return c.load("i64", c.at("i64", self.job["positions"], c.add(self.first_row, row)), 8)

    def _clear(self, rows: Value) -> None:
        def body(row: Value, _: list[Value]) -> list[Value]:
            c = self.c
            for n in range(self.shape.dim // LANES):
                c.store(FLOATS, floats(0), self._sums(row, n), 64)
            c.store(FLOATS, floats(0), c.at(FLOATS, self.scratch["l"], row), 64)
            c.store(FLOATS, floats(_LEAST), c.at(FLOATS, self.scratch["m"], row), 64)
            return []

        self.c.loop(0, rows, [], body)

    def _sums(self, row: Value, part: int) -> Value:
        c = self.c
        return c.at(FLOATS, self.scratch["o"], c.add(c.mul(row, self.shape.dim // LANES), part))

    # ---- a block of keys ----------------------------------------------------------------------------------------

    def _block(self, groups: Value, block: Value, _: list[Value]) -> list[Value]:
        c = self.c
        self.first_key = c.mul(block, KEYS)
        head = c.mul(self.head, self.job["head_size"])
        self._pages_of(block, partial(self._take_keys, head), partial(self._take_values, head))
        c.loop(0, groups, [], partial(self._group, self._attend))
        return []

    def _look_at(self, groups: Value, block: Value, _: list[Value]) -> list[Value]:
        """A second pass, when the sums are known: the probabilities themselves."""
        c = self.c
        self.first_key = c.mul(block, KEYS)
        self._pages_of(block, partial(self._take_keys, c.mul(self.head, self.job["head_size"])))
        c.loop(0, groups, [], partial(self._group, self._look))
        return []

    def _pages_of(self, block: Value, *takes: partial[None]) -> None:
        """Each of ``takes`` for every page of a block."""
        c, count = self.c, KEYS // PAGE

        def body(page: Value, _: list[Value]) -> list[Value]:
            slot = c.load("i64", c.at("i64", self.pages, c.add(c.mul(block, count), page)), 8)
            for take in takes:
                take(page, slot)
            return []

        c.loop(0, count, [], body)

    def _element(self, tensor: Value, head: Value, slot: Value) -> Value:
        c = self.c
        return c.at("i8", tensor, c.mul(c.add(head, c.mul(slot, self.shape.dim)), self.shape.size))

    def _take_keys(self, head: Value, page: Value, slot: Value) -> None:
        """``[keys, words]`` to ``[words, keys]``, a square of 16 at a time."""
        c, words = self.c, self.shape.words
        source = self._element(self.job["keys"], head, slot)

        def sixteen(part: Value, _: list[Value]) -> list[Value]:
            first = c.at("i32", source, c.mul(part, LANES * words))
            column = c.at("i32", self.scratch["k"], c.add(c.mul(page, PAGE), c.mul(part, LANES)))
            for word in range(0, words, LANES):
                count = min(LANES, words - word)
                lines = [self._words(c.at("i32", first, i * words + word), count) for i in range(LANES)]
                for i, line in enumerate(self._transposed(lines)[:count]):
                    c.store(WORDS, line, c.at("i32", column, (word + i) * KEYS), 64)
            return []

        c.loop(0, PAGE // LANES, [], sixteen)

    def _words(self, pointer: Value, count: int) -> Value:
        """16 words, of which so many are read: 16 or 8."""
        c, half = self.c, "<8 x i32>"
        if count == LANES:
            return c.load(WORDS, pointer, 4)
        return c.shuffle(half, c.load(half, pointer, 4), "poison", [*range(8), *[8] * 8])

    def _transposed(self, lines: list[Value]) -> list[Value]:
        step = 1
        while step < LANES:
            for i in range(LANES):
                if i & step:
                    continue
                a, b = lines[i], lines[i | step]
                low = [LANES + (j ^ step) if j & step else j for j in range(LANES)]
                high = [LANES + j if j & step else j | step for j in range(LANES)]
                lines[i], lines[i | step] = (self.c.shuffle(WORDS, a, b, way) for way in (low, high))
            step *= 2
        return lines

    def _take_values(self, head: Value, page: Value, slot: Value) -> None:
        """``[keys, dim]`` to ``[keys / 2, dim, 2]`` of bfloat16; float32 as it is."""
        c, dim = self.c, self.shape.dim
        source = self._element(self.job["values"], head, slot)
        lines = PAGE * self.shape.size // 4

        def line(n: Value, _: list[Value]) -> list[Value]:
            target = c.at("i32", self.scratch["v"], c.mul(c.add(c.mul(page, lines), n), dim))
            if not self.shape.brain:
                for part in range(0, dim, LANES):
                    words = c.load(WORDS, c.at("i32", source, c.add(c.mul(n, dim), part)), 4)
                    c.store(WORDS, words, c.at("i32", target, part), 64)
                return []
            for part in range(0, dim, 2 * LANES):
                count = min(2 * LANES, dim - part)
                kind = f"<{count} x i16>"
                a, b = (
                    c.load(kind, c.at("i16", source, c.add(c.mul(c.add(c.mul(n, 2), k), dim), part)), 2)
                    for k in range(2)
                )
                for start in range(0, count, LANES):
                    pairs = [k * count + start + j for j in range(LANES) for k in range(2)]
                    c.store("<32 x i16>", c.shuffle(kind, a, b, pairs), c.at("i32", target, part + start), 64)
            return []

        c.loop(0, lines, [], line)

    # ---- four rows and a block ----------------------------------------------------------------------------------

    def _group(self, work: Callable[[list[_Row], list[Value]], None], group: Value, _: list[Value]) -> list[Value]:
        """``work`` for four rows and their positions, if they see any key of the block."""
        c = self.c
        ats = [c.add(c.mul(group, _ROWS), n) for n in range(_ROWS)]
        places = [self._row_and_head(at) for at in ats]
        positions = [self._position(row) for row, _ in places]
        above = c.compare("sge", positions[-1], self.first_key)
        gone = c.sub(positions[0], self.job["window"])
        within = c.compare("slt", gone, c.add(self.first_key, KEYS - 1))

        def body() -> list[Value]:
            rows = []
            for at, place, position in zip(ats, places, positions, strict=True):
                unseen = c.most(c.sub(position, self.job["window"]), -1)
                query = self._element_of("query", *place)
                rows.append(_Row(at, self._spread(position), self._spread(unseen), query, place[1]))
            work(rows, positions)
            return []

        c.when(c.get(f"and i1 {above}, {within}"), [], body)
        return []

    def _spread(self, number: Value) -> Value:
        return self.c.spread("i32", self.c.get(f"trunc i64 {number} to i32"))

    def _row_and_head(self, at: Value) -> tuple[Value, Value]:
        """Of a number among a tile's rows and heads; of the last one where there are no four left."""
        c, per_kv = self.c, self.shape.per_kv
        last = c.least(at, self.last)
        return c.div(last, per_kv), c.rest(last, per_kv)

    def _element_of(self, tensor: str, row: Value, head: Value) -> Value:
        """A row's head in ``query`` or ``out``."""
        c, per_kv = self.c, self.shape.per_kv
        before = c.mul(c.mul(c.add(self.first_row, row), self.job["kv_heads"]), per_kv)
        heads = c.add(c.add(before, c.mul(self.head, per_kv)), head)
        return c.at("i8", self.job[tensor], c.mul(heads, self.shape.dim * self.shape.size))

    def _scores(self, rows: list[_Row], positions: list[Value]) -> list[Value]:
        """In units of log 2, 16 keys for each of ``PARTS`` of every row; hidden ones far below all others."""
        c, shape = self.c, self.shape
        queries = [r.query for r in rows]
        by_part: list[list[Value]] = []
        for part in range(0, PARTS, shape.parts):
            found = self._product(queries, "k", shape.words, KEYS, shape.parts, part * LANES)
            by_part += [found[n :: shape.parts] for n in range(shape.parts)]
        scores = [self._score(by_part[part][i]) for i in range(_ROWS) for part in range(PARTS)]
        oldest = c.sub(positions[-1], self.job["window"])
        hides = c.get(
            f"or i1 {c.compare('slt', positions[0], c.add(self.first_key, KEYS - 1))}, "
            f"{c.compare('sge', oldest, self.first_key)}"
        )
        return c.when(hides, [(FLOATS, s) for s in scores], partial(self._mask, rows, scores))

    def _look(self, rows: list[_Row], positions: list[Value]) -> None:
        """The strongest probability that any row gives each key."""
        c, scores = self.c, self._scores(rows, positions)
        for i, row in enumerate(rows):
            most, inverse = (c.load(FLOATS, c.at(FLOATS, self.scratch[name], row.at), 64) for name in ("m", "l"))
            start = c.add(c.mul(row.head, self.job["look_size"]), self.first_key)
            for part in range(PARTS):
                found = self._exp2(c.float_op("fsub", scores[i * PARTS + part], most))
                place = c.at("float", self.looks, c.add(start, part * LANES))
                strongest = c.larger(c.load(FLOATS, place, 4), c.float_op("fmul", found, inverse))
                c.store(FLOATS, strongest, place, 4)

    def _attend(self, rows: list[_Row], positions: list[Value]) -> None:
        c, shape, scores = self.c, self.shape, self._scores(rows, positions)
        shrinks = []
        for i, row in enumerate(rows):
            mine = scores[i * PARTS : (i + 1) * PARTS]
            kept = c.at(FLOATS, self.scratch["m"], row.at)
            old = c.load(FLOATS, kept, 64)
            most = c.larger(c.larger(mine[0], mine[1]), c.larger(mine[2], mine[3]))
            new = c.larger(old, c.spread("float", c.get(f"call nnan float @{_MAX}({FLOATS} {most})")))
            c.store(FLOATS, new, kept, 64)
            shrink = self._exp2(c.float_op("fsub", old, new))
            found = [self._exp2(c.float_op("fsub", s, new)) for s in mine]
            total = c.float_op("fadd", *(c.float_op("fadd", *found[n : n + 2]) for n in (0, 2)))
            summed = c.at(FLOATS, self.scratch["l"], row.at)
            c.store(FLOATS, c.fma(c.load(FLOATS, summed, 64), shrink, total), summed, 64)
            for n, p in enumerate(found):
                self._keep(p, c.at("i32", self.scratch["p"], i * shape.key_words + n * LANES * shape.size // 4))
            shrinks.append(shrink)
        lines = [c.at("i32", self.scratch["p"], i * shape.key_words) for i in range(_ROWS)]
        for start in range(0, shape.dim // LANES, shape.parts):
            parts = min(shape.parts, shape.dim // LANES - start)
            places = [self._sums(row.at, start + n) for row in rows for n in range(parts)]
            before = [
                c.float_op("fmul", c.load(FLOATS, place, 64), shrinks[n // parts]) for n, place in enumerate(places)
            ]
            after = self._product(lines, "v", shape.key_words, shape.dim, parts, start * LANES, before)
            for place, value in zip(places, after, strict=True):
                c.store(FLOATS, value, place, 64)

    def _product(
        self,
        lines: list[Value],
        weight: str,
        words: int,
        width: int,
        parts: int,
        start: int = 0,
        sums: list[Value] | None = None,
    ) -> list[Value]:
        """Four rows of words times ``[words, width]``, 16 columns for each of ``parts`` from ``start`` on."""
        c = self.c

        def body(word: Value, sums: list[Value]) -> list[Value]:
            at = c.add(c.mul(word, width), start)
            weights = [c.load(WORDS, c.at("i32", self.scratch[weight], c.add(at, n * LANES)), 64) for n in range(parts)]
            numbers = [c.spread("i32", c.load("i32", c.at("i32", line, word), 4)) for line in lines]
            return [
                self._multiply(sums[i * parts + n], weights[n], numbers[i])
                for i in range(len(lines))
                for n in range(parts)
            ]

        zeros = ["zeroinitializer"] * (len(lines) * parts)
        return c.loop(0, words, [(FLOATS, s) for s in sums or zeros], body)

    def _multiply(self, total: Value, a: Value, b: Value) -> Value:
        c = self.c
        if not self.shape.brain:
            return c.fma(c.cast(a, WORDS, FLOATS), c.cast(b, WORDS, FLOATS), total)
        if not self.shape.pairs:
            return c.fma(self._high(a), self._high(b), c.fma(self._low(a), self._low(b), total))
        kind = "<32 x bfloat>"
        return c.call(
            FLOATS, DOT, f"{FLOATS} {total}", f"{kind} {c.cast(a, WORDS, kind)}", f"{kind} {c.cast(b, WORDS, kind)}"
        )

    def _low(self, words: Value) -> Value:
        """The first of each pair of bfloat16 numbers."""
        c = self.c
        return c.cast(c.get(f"shl {WORDS} {words}, {_SIXTEENS}"), WORDS, FLOATS)

    def _high(self, words: Value) -> Value:
        c = self.c
        return c.cast(c.get(f"and {WORDS} {words}, {vector('i32', [-65536] * LANES)}"), WORDS, FLOATS)

    def _score(self, product: Value) -> Value:
        """In units of log 2."""
        c = self.c
        scaled = c.float_op("fmul", product, self.scale)
        if not self.shape.capped:
            return scaled
        # cap * tanh(x), where exp2(scaled) is exp(2 x): 1 - 2 / (exp(2 x) + 1). Far out it is 1 to the last bit.
        near = c.smaller(c.larger(scaled, floats(-60)), floats(60))
        grown = c.float_op("fadd", self._exp2(near), floats(1))
        return c.float_op("fmul", self.cap, c.float_op("fsub", floats(1), c.float_op("fdiv", floats(2), grown)))

    def _mask(self, rows: list[_Row], scores: list[Value]) -> list[Value]:
        c, out = self.c, []
        first = self._spread(self.first_key)
        for part in range(PARTS):
            numbers = vector("i32", [part * LANES + j for j in range(LANES)])
            keys = c.get(f"add {WORDS} {first}, {numbers}")
            for i, row in enumerate(rows):
                later = c.get(f"icmp sgt {WORDS} {keys}, {row.position}")
                older = c.get(f"icmp sle {WORDS} {keys}, {row.unseen}")
                hidden = c.get(f"or <16 x i1> {later}, {older}")
                score = scores[i * PARTS + part]
                out.append(c.get(f"select <16 x i1> {hidden}, {FLOATS} {floats(_MASKED)}, {FLOATS} {score}"))
        return [out[part * _ROWS + i] for i in range(_ROWS) for part in range(PARTS)]

    def _exp2(self, x: Value) -> Value:
        c = self.c
        x = c.larger(x, floats(-127))
        whole = c.call(FLOATS, _RINT, f"{FLOATS} {x}")
        part = c.float_op("fsub", x, whole)
        power = floats(_EXP2[0])
        for factor in _EXP2[1:]:
            power = c.fma(power, part, floats(factor))
        exponent = c.get(f"fptosi {FLOATS} {whole} to {WORDS}")
        biased = c.get(f"add {WORDS} {exponent}, {vector('i32', [127] * LANES)}")
        bits = c.get(f"shl {WORDS} {biased}, {vector('i32', [23] * LANES)}")
        return c.float_op("fmul", power, c.cast(bits, WORDS, FLOATS))

    def _keep(self, numbers: Value, pointer: Value) -> None:
        """Stores 16 numbers as elements, bfloat16 rounded to the nearest even one."""
        c = self.c
        if not self.shape.brain:
            c.store(FLOATS, numbers, pointer, 4)
        elif self.shape.pairs:
            c.store("<16 x bfloat>", c.call("<16 x bfloat>", NARROW, f"{FLOATS} {numbers}"), pointer, 2)
        else:
            bits = c.cast(numbers, FLOATS, WORDS)
            last = c.get(f"and {WORDS} {c.get(f'lshr {WORDS} {bits}, {_SIXTEENS}')}, {vector('i32', [1] * LANES)}")
            up = c.get(f"add {WORDS} {last}, {vector('i32', [0x7FFF] * LANES)}")
            rounded = c.get(f"lshr {WORDS} {c.get(f'add {WORDS} {bits}, {up}')}, {_SIXTEENS}")
            c.store("<16 x i16>", c.get(f"trunc {WORDS} {rounded} to <16 x i16>"), pointer, 2)

    def _finish(self, group: Value, _: list[Value]) -> list[Value]:
        c, shape = self.c, self.shape
        for n in range(_ROWS):
            at = c.add(c.mul(group, _ROWS), n)
            out = self._element_of("out", *self._row_and_head(at))
            summed = c.load(FLOATS, c.at(FLOATS, self.scratch["l"], at), 64)
            total = c.get(f"call reassoc float @{_SUM}(float 0.0, {FLOATS} {summed})")
            inverse = c.spread("float", c.get(f"fdiv float 1.0, {total}"))
            c.store(FLOATS, inverse, c.at(FLOATS, self.scratch["l"], at), 64)
            for part in range(shape.dim // LANES):
                value = c.float_op("fmul", c.load(FLOATS, self._sums(at, part), 64), inverse)
                self._keep(value, c.at("i8", out, part * LANES * shape.size))
        return []
