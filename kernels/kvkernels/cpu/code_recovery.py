"""Recovers quantization codes from weights that were dequantized to floats.

GGUF's Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 (https://github.com/ggml-org/ggml, ggml-quants.c) give 32 neighbouring inputs of
an output a scale and a base of 16 bits each: a value is ``code * scale + base``, rounded once. If every value of a
weight has this form, its codes, scales and bases take a sixth to a third of its bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kvkernels.cpu.cpu_library import Kernel, load_kernel

# Bits of a code, by storage format.
BITS = {"coded4": 4, "coded8": 8}
# Inputs that share a scale and a base; outputs that are interleaved in memory.
GROUP = OUTPUTS = 32
_LARGEST = {4: 15, 8: 255}
# Number of groups that are tried first. They show for most weights that they have no codes, and for other weights which
# candidate matches.
_SAMPLED_GROUPS = 256


@dataclass(frozen=True)
class GroupCodes:
    """Codes of a weight, with their scales and bases.

    ``codes [outputs, inputs]`` (uint8), ``scales`` and ``bases [outputs, inputs / GROUP]`` (float16).
    """

    codes: Tensor
    scales: Tensor
    bases: Tensor


@dataclass(frozen=True)
class PackedCodes:
    """Packed codes of a weight, in the layout that ``f32_gemm.cpp`` reads.

    ``data [strips of OUTPUTS, bytes]`` (uint8) is zero-padded after the last output. ``match_counts``: the number of
    groups for which each candidate was the first to match.
    """

    data: Tensor
    bits: int
    match_counts: tuple[int, ...]


def recover_codes(weight: Tensor, widths: Sequence[int] = (4, 8)) -> PackedCodes | None:
    """Recover the codes of a float32 weight ``[outputs, inputs]``.

    Uses the first width that encodes every value; returns None if no width does. A negative zero becomes positive,
    which changes no sum of products.
    """
    outputs, inputs = weight.shape
    if inputs % GROUP:
        return None
    weight = weight.contiguous()
    rows = weight[:: max(1, outputs // 16)].reshape(-1, GROUP)
    few = rows[:: max(1, len(rows) // _SAMPLED_GROUPS)].contiguous()
    for bits in widths:
        candidates = _CANDIDATES[bits]
        sampled = _recover(few, bits, candidates)
        if sampled is None:
            continue
        order = sorted(range(len(candidates)), key=lambda i: -sampled.match_counts[i])
        found = _recover(weight, bits, [candidates[i] for i in order])
        if found is not None:
            return found
    return None


class QuantizerKind(IntEnum):
    """Rule that derives scale and base from a group's minimum and maximum.

    Numbered as in kernels/cpu/jobs.h.
    """

    SYMMETRIC = 0  # Q4_0, Q5_0, Q8_0: the largest magnitude is ``steps`` away from 0, whose code is ``zero``
    MIN_BASED = 1  # Q4_1, Q5_1 and other symmetric scales: the minimum has the code 0, the maximum ``steps``
    MAX_BASED = 2  # the maximum has the code 0, the minimum ``steps``


@dataclass(frozen=True)
class QuantizerCandidate:
    """Parameters that a quantizer may have used."""

    kind: QuantizerKind
    steps: int
    zero: int = 0

    def __call__(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return scales and bases for the groups' minima and maxima ``[groups]``."""
        if self.kind is QuantizerKind.SYMMETRIC:
            scale = (torch.where(high > -low, high, low) / -self.steps).half()
            return scale, -self.zero * scale
        scale = ((high - low) / self.steps).half()
        return (scale, low.half()) if self.kind is QuantizerKind.MIN_BASED else (-scale, high.half())


def _symmetric(steps: int, zero: int) -> QuantizerCandidate:
    return QuantizerCandidate(QuantizerKind.SYMMETRIC, steps, zero)


def _asymmetric(max_steps: int, min_steps: int) -> list[QuantizerCandidate]:
    return [
        QuantizerCandidate(kind, steps)
        for steps in range(max_steps, min_steps - 1, -1)
        for kind in (QuantizerKind.MIN_BASED, QuantizerKind.MAX_BASED)
    ]


_OF_4 = [_symmetric(8, 8), _symmetric(7, 8), *_asymmetric(15, 1)]
_OF_5 = [_symmetric(16, 16), _symmetric(15, 16), *_asymmetric(31, 16)]
# A weight that was concatenated from several may have codes of both widths.
_CANDIDATES = {4: _OF_4, 8: [_symmetric(127, 128), *_OF_5, *_OF_4]}


class _Candidate(ctypes.Structure):
    """``QuantizerCandidate`` in jobs.h."""

    _fields_ = (("kind", ctypes.c_int64), ("steps", ctypes.c_float), ("zero", ctypes.c_float))


class _Job(ctypes.Structure):
    """``CodeRecoveryJob`` in jobs.h."""

    _fields_ = (
        ("next_item", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("weight", "data")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "strip_bytes", "largest")),
        ("candidate", ctypes.c_void_p),
        ("num_candidates", ctypes.c_int64),
        ("match_counts", ctypes.c_void_p),
    )


@cache
def kernel() -> Kernel | None:
    """Return the search kernel; None if no variant runs."""
    return load_kernel("code_recovery", _Job)


def _recover(weight: Tensor, bits: int, candidates: Sequence[QuantizerCandidate]) -> PackedCodes | None:
    """Recover the codes of a contiguous float32 weight ``[outputs, inputs]``.

    Returns None if a value has no code.
    """
    serving = kernel()
    if serving is None:
        return reference(weight, bits, candidates)
    outputs, inputs = weight.shape
    data = torch.empty(-(-outputs // OUTPUTS), strip_bytes(inputs, bits), dtype=torch.uint8)
    matches = (ctypes.c_int64 * (len(candidates) + 1))()
    array = (_Candidate * len(candidates))(*(_Candidate(c.kind, c.steps, c.zero) for c in candidates))
    job = _Job(
        0,
        weight.data_ptr(),
        data.data_ptr(),
        outputs,
        inputs,
        data.shape[1],
        _LARGEST[bits],
        ctypes.addressof(array),
        len(candidates),
        ctypes.addressof(matches),
    )
    serving.run_on_openmp_team(job, 1 if weight.numel() <= _SAMPLED_GROUPS * GROUP else torch.get_num_threads())
    *of_candidates, of_none = matches
    return None if of_none else PackedCodes(data, bits, tuple(of_candidates))


def reference(weight: Tensor, bits: int, candidates: Sequence[QuantizerCandidate]) -> PackedCodes | None:
    """Recover codes in plain torch: the test oracle."""
    groups = weight.reshape(-1, GROUP)
    kept: tuple[Tensor, Tensor, Tensor] | None = None
    left, at = groups, torch.empty(0, dtype=torch.int64)  # groups without a matching candidate so far
    low, high = groups.amin(1), groups.amax(1)
    count = [0] * len(candidates)
    for number, candidate in enumerate(candidates):
        scale, base = candidate(low, high)
        wide, start = scale.float()[:, None], base.float()[:, None]
        code = (left - start).div_(torch.where(wide == 0, 1.0, wide)).round_()
        # Rounded only once: the product of a code and a scale has 19 bits and is exact.
        right = (torch.addcmul(start, code, wide) == left).all(1)
        right &= (code.amin(1) >= 0) & (code.amax(1) <= _LARGEST[bits])
        code, count[number] = code.to(torch.uint8), int(right.sum())
        if kept is None:
            kept, at = (code, scale, base), (~right).nonzero()[:, 0]
        elif count[number]:
            for all_of, mine in zip(kept, (code, scale, base), strict=True):
                all_of[at[right]] = mine[right]
            at = at[~right]
        if not len(at):
            codes, scales, bases = (part.view(len(weight), -1) for part in kept)
            return PackedCodes(_pack(GroupCodes(codes, scales, bases), bits), bits, tuple(count))
        if count[number]:
            left, low, high = groups[at], low[~right], high[~right]
    return None


def dequantize(found: GroupCodes) -> Tensor:
    """Return the weight in float32."""
    scales, bases = (x.double().repeat_interleave(GROUP, 1) for x in (found.scales, found.bases))
    return (found.codes.double() * scales + bases).float()


def strip_bytes(inputs: int, bits: int) -> int:
    """Return the bytes of one strip of OUTPUTS interleaved outputs."""
    return inputs * OUTPUTS * bits // 8 + inputs // GROUP * OUTPUTS * 4


def _pack(found: GroupCodes, bits: int) -> Tensor:
    """Pack to ``[strips, bytes]``, zero-padded after the last output."""
    more = -len(found.codes) % OUTPUTS
    codes, scales, bases = (F.pad(x, (0, 0, 0, more)) for x in (found.codes, found.scales, found.bases))
    strips, groups = len(codes) // OUTPUTS, codes.shape[1] // GROUP
    lines = codes.view(strips, OUTPUTS, groups, GROUP)
    if bits == 4:
        lines = lines[..., ::2] | lines[..., 1::2] << 4
    both = torch.stack((scales, bases), 1).view(strips, OUTPUTS, 2, groups)
    return torch.cat(
        (
            lines.permute(0, 2, 3, 1).reshape(strips, groups, -1),
            both.permute(0, 3, 2, 1).contiguous().view(torch.uint8).view(strips, groups, -1),
        ),
        2,
    ).view(strips, -1)


def unpack(data: Tensor, inputs: int, bits: int) -> GroupCodes:
    """Unpack the codes of ``data [strips, bytes]``, padding included."""
    strips, groups = len(data), inputs // GROUP
    lines = data.view(strips, groups, -1)
    size = GROUP * OUTPUTS * bits // 8
    codes = lines[..., :size].view(strips, groups, -1, OUTPUTS)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), 3).view(strips, groups, GROUP, OUTPUTS)
    both = lines[..., size:].contiguous().view(torch.float16).view(strips, groups, 2, OUTPUTS)
    scales, bases = both.permute(2, 0, 3, 1).reshape(2, strips * OUTPUTS, groups)
    return GroupCodes(codes.permute(0, 3, 1, 2).reshape(strips * OUTPUTS, inputs), scales, bases)
