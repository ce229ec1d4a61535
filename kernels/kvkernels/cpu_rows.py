"""The elementwise parts of a decoder layer on the CPU, fused: norm, rotation with scatter, gated activation.

All work row by row, with the same instructions for a row whatever else is in the batch, so that results do not
depend on the batch. Rounding follows the eager model: bfloat16 after the normalization and after the activation,
float32 inside. ``brain`` says that 16-bit arrays hold bfloat16 bits; otherwise all are float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvkernels.compiled import compiled, over_parts

# Below this many rows handing work to another thread costs more than it saves.
_PARALLEL_ROWS = 48
_LANES = 16


@compiled
def _widen(row: Any, out: Any, out_bits: Any, brain: bool) -> None:
    for c in range(row.shape[0]):
        if brain:
            out_bits[c] = np.uint32(row[c]) << np.uint32(16)
        else:
            out[c] = row[c]


@compiled
def _round(x: Any, bits: Any, brain: bool) -> None:
    """Rounds float32 values to bfloat16 precision in place, to nearest even."""
    if brain:
        for c in range(x.shape[0]):
            b = bits[c]
            bits[c] = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)


@compiled
def _put(x: Any, bits: Any, row: Any, brain: bool) -> None:
    """Writes values that are rounded already."""
    for c in range(row.shape[0]):
        if brain:
            row[c] = np.uint16(bits[c] >> np.uint32(16))
        else:
            row[c] = x[c]


@compiled
def _normalize(x: Any, xb: Any, squares: Any, epsilon: float, weight: Any, brain: bool) -> None:
    """Divides by the root mean square (``squares`` is the sum) and multiplies by ``weight``, in place."""
    width = x.shape[0]
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(width) + np.float32(epsilon))
    for c in range(width):
        x[c] *= scale
    _round(x, xb, brain)
    for c in range(width):
        x[c] *= weight[c]
    _round(x, xb, brain)


@compiled
def _norm_rows(
    first: int, end: int, brain: bool, hidden: Any, delta: Any, add: bool, weight: Any, epsilon: float, out: Any
) -> None:
    width = hidden.shape[1]
    x, y, lanes = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(_LANES, np.float32)
    xb, yb = x.view(np.uint32), y.view(np.uint32)
    for r in range(first, end):
        _widen(hidden[r], x, xb, brain)
        if add:
            _widen(delta[r], y, yb, brain)
            for c in range(width):
                x[c] += y[c]
            _round(x, xb, brain)
            _put(x, xb, hidden[r], brain)
        lanes[:] = 0
        for c in range(0, width - _LANES + 1, _LANES):
            for j in range(_LANES):
                lanes[j] += x[c + j] * x[c + j]
        total = np.float32(0.0)
        for j in range(_LANES):
            total += lanes[j]
        for c in range(width - width % _LANES, width):
            total += x[c] * x[c]
        _normalize(x, xb, total, epsilon, weight, brain)
        _put(x, xb, out[r], brain)


@compiled
def _head(source: Any, at: int, dim: int, x: Any, xb: Any, brain: bool, weight: Any, epsilon: float) -> None:
    """A head's vector in float32, normalized when ``weight`` is not empty (Qwen3)."""
    _widen(source[at : at + dim], x, xb, brain)
    if weight.shape[0]:
        total = np.float32(0.0)
        for d in range(dim):
            total += x[d] * x[d]
        _normalize(x, xb, total, epsilon, weight, brain)


@compiled
def _turn(x: Any, y: Any, cos: Any, sin: Any) -> None:
    """Rotates a head's vector: halves, as Llama pairs channels."""
    half = x.shape[0] // 2
    for d in range(half):
        y[d] = x[d] * cos[d] - x[d + half] * sin[d]
        y[d + half] = x[d + half] * cos[d + half] + x[d] * sin[d + half]


@compiled
def _rotate_rows(
    first: int, end: int, brain: bool, qkv: Any, heads: int, kv_heads: int, dim: int, cos: Any, sin: Any,
    q_weight: Any, k_weight: Any, epsilon: float, slots: Any, pool_k: Any, pool_v: Any,
    queries: Any,
) -> None:  # fmt: skip
    group = heads // kv_heads
    x, y = np.empty(dim, np.float32), np.empty(dim, np.float32)
    xb, yb = x.view(np.uint32), y.view(np.uint32)
    for r in range(first, end):
        for h in range(kv_heads):
            for j in range(group):
                _head(qkv[r], (h * group + j) * dim, dim, x, xb, brain, q_weight, epsilon)
                _turn(x, y, cos[r], sin[r])
                _round(y, yb, brain)
                at = (h * group + j) * dim
                _put(y, yb, queries[r, at : at + dim], brain)
            _head(qkv[r], (heads + h) * dim, dim, x, xb, brain, k_weight, epsilon)
            _turn(x, y, cos[r], sin[r])
            _round(y, yb, brain)
            _put(y, yb, pool_k[h, slots[r]], brain)
            at = (heads + kv_heads + h) * dim
            for d in range(dim):
                pool_v[h, slots[r], d] = qkv[r, at + d]


@compiled
def _gate_rows(first: int, end: int, brain: bool, gate_up: Any, out: Any) -> None:
    """``silu(gate) * up``. exp is Cephes' polynomial: 2 ulp, and the compiler can vectorize it."""
    width = out.shape[1]
    g, u, p, e = (np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32),
                  np.empty(width, np.float32))  # fmt: skip
    gb, ub, eb = g.view(np.uint32), u.view(np.uint32), e.view(np.int32)
    for r in range(first, end):
        _widen(gate_up[r, :width], g, gb, brain)
        _widen(gate_up[r, width:], u, ub, brain)
        # Two loops: writing the exponent's bits and reading them as a float in one would keep it scalar.
        for c in range(width):
            x = min(max(-g[c], np.float32(-87.0)), np.float32(87.0))
            n = np.floor(x * np.float32(1.4426950408889634) + np.float32(0.5))
            z = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
            y = np.float32(1.9875691500e-4)
            y = y * z + np.float32(1.3981999507e-3)
            y = y * z + np.float32(8.3334519073e-3)
            y = y * z + np.float32(4.1665795894e-2)
            y = y * z + np.float32(1.6666665459e-1)
            y = y * z + np.float32(5.0000001201e-1)
            p[c] = y * z * z + z + np.float32(1.0)
            eb[c] = (np.int32(n) + np.int32(127)) << np.int32(23)
        for c in range(width):
            g[c] = g[c] / (np.float32(1.0) + p[c] * e[c])
        _round(g, gb, brain)
        for c in range(width):
            g[c] *= u[c]
        _round(g, gb, brain)
        _put(g, gb, out[r], brain)


def _over_rows(kernel: Any, rows: int, *arguments: Any) -> None:
    if rows < _PARALLEL_ROWS:
        kernel(0, rows, *arguments)
    else:
        over_parts(kernel, range(rows), *arguments)


def norm_rows(rows: int, brain: bool, hidden: Any, delta: Any | None, weight: Any, epsilon: float, out: Any) -> None:
    """Adds ``delta`` (if any) to ``hidden [>= rows, width]`` in place and writes its RMS norm times ``weight``
    (float32) to ``out``."""
    add = delta is not None
    _over_rows(_norm_rows, rows, brain, hidden, delta if add else hidden, add, weight, epsilon, out)


def rotate_rows(rows: int, *arguments: Any) -> None:
    """Rotates queries and keys of ``qkv [rows, (heads + 2 kv_heads) * dim]`` (after an RMS norm per head where
    the weights are not empty), writes keys and values to the pool at ``slots`` and queries to ``queries [rows,
    heads * dim]``."""
    _over_rows(_rotate_rows, rows, *arguments)


def gate_rows(rows: int, brain: bool, gate_up: Any, out: Any) -> None:
    """``out [rows, width] = silu(gate_up[:, :width]) * gate_up[:, width:]``."""
    _over_rows(_gate_rows, rows, brain, gate_up, out)
