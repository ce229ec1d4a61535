"""Weights of checkpoints that were quantized and written out as numbers: their codes, found again.

GGUF's Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 (https://github.com/ggml-org/ggml, ggml-quants.c) give 32 neighbouring inputs of
an output a scale and a base of 16 bits: a number is ``code * scale + base``, rounded once. Where every number of a
weight is one, a sixth to a third of its bytes hold it exactly.
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

from kvkernels.cpu.cpu_library import Kernel, best

# Bits of a code, by how a weight is kept.
BITS = {"coded4": 4, "coded8": 8}
# Inputs that share a scale and a base, and outputs that lie side by side.
GROUP = OUTPUTS = 32
_LARGEST = {4: 15, 8: 255}
# A few groups say of most weights that they have no codes, and of the others which guess is right.
_TRIED = 256


@dataclass(frozen=True)
class Codes:
    """A weight's: ``codes [outputs, inputs]`` (uint8), ``scales`` and ``bases [outputs, inputs / GROUP]`` (float16)."""

    codes: Tensor
    scales: Tensor
    bases: Tensor


@dataclass(frozen=True)
class Packed:
    """A weight's codes as kernels/cpu/dense.cpp reads them: ``data [strips of OUTPUTS, bytes]`` (uint8), zeros behind
    the last output; and for how many groups each guess was the first that is right."""

    data: Tensor
    bits: int
    right: tuple[int, ...]


def find(weight: Tensor, widths: Sequence[int] = (4, 8)) -> Packed | None:
    """The codes of a float32 weight ``[outputs, inputs]`` at the first of these widths at which every number has one;
    None without any. A zero may lose its sign, which no sum of products knows."""
    outputs, inputs = weight.shape
    if inputs % GROUP:
        return None
    weight = weight.contiguous()
    rows = weight[:: max(1, outputs // 16)].reshape(-1, GROUP)
    few = rows[:: max(1, len(rows) // _TRIED)].contiguous()
    for bits in widths:
        guesses = _GUESSES[bits]
        of_few = _look(few, bits, guesses)
        if of_few is None:
            continue
        order = sorted(range(len(guesses)), key=lambda i: -of_few.right[i])
        found = _look(weight, bits, [guesses[i] for i in order])
        if found is not None:
            return found
    return None


class Kind(IntEnum):
    """How a group's lowest and highest number give its scale and base; as in kernels/cpu/jobs.h."""

    CENTRED = 0  # Q4_0, Q5_0, Q8_0: the strongest number is so many steps away from 0, whose code is ``zero``
    RISING = 1  # Q4_1, Q5_1, and what was centred another way: the lowest has the code 0, the highest ``steps``
    FALLING = 2  # the other way round


@dataclass(frozen=True)
class Guess:
    """What a quantizer may have done."""

    kind: Kind
    steps: int
    zero: int = 0

    def __call__(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Scales and bases of the lowest and the highest numbers ``[groups]``."""
        if self.kind is Kind.CENTRED:
            scale = (torch.where(high > -low, high, low) / -self.steps).half()
            return scale, -self.zero * scale
        scale = ((high - low) / self.steps).half()
        return (scale, low.half()) if self.kind is Kind.RISING else (-scale, high.half())


def _centred(steps: int, zero: int) -> Guess:
    return Guess(Kind.CENTRED, steps, zero)


def _spreads(most: int, least: int) -> list[Guess]:
    return [Guess(kind, steps) for steps in range(most, least - 1, -1) for kind in (Kind.RISING, Kind.FALLING)]


_OF_4 = [_centred(8, 8), _centred(7, 8), *_spreads(15, 1)]
_OF_5 = [_centred(16, 16), _centred(15, 16), *_spreads(31, 16)]
# A weight that was joined of several may have codes of both widths.
_GUESSES = {4: _OF_4, 8: [_centred(127, 128), *_OF_5, *_OF_4]}


class _Guess(ctypes.Structure):
    """``CodeGuess`` in jobs.h."""

    _fields_ = (("kind", ctypes.c_int64), ("steps", ctypes.c_float), ("zero", ctypes.c_float))


class _Job(ctypes.Structure):
    """``CodesJob`` in jobs.h."""

    _fields_ = (
        ("taken", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("weight", "data")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "strip_bytes", "largest")),
        ("guess", ctypes.c_void_p),
        ("guesses", ctypes.c_int64),
        ("right", ctypes.c_void_p),
    )


@cache
def kernel() -> Kernel | None:
    """What looks; None where no variant runs."""
    return best("codes", _Job)


def _look(weight: Tensor, bits: int, guesses: Sequence[Guess]) -> Packed | None:
    """The codes of a contiguous float32 weight ``[outputs, inputs]``; None when a number has none."""
    serving = kernel()
    if serving is None:
        return reference(weight, bits, guesses)
    outputs, inputs = weight.shape
    data = torch.empty(-(-outputs // OUTPUTS), strip_bytes(inputs, bits), dtype=torch.uint8)
    right = (ctypes.c_int64 * (len(guesses) + 1))()
    tried = (_Guess * len(guesses))(*(_Guess(guess.kind, guess.steps, guess.zero) for guess in guesses))
    job = _Job(
        0,
        weight.data_ptr(),
        data.data_ptr(),
        outputs,
        inputs,
        data.shape[1],
        _LARGEST[bits],
        ctypes.addressof(tried),
        len(guesses),
        ctypes.addressof(right),
    )
    serving.together(job, 1 if weight.numel() <= _TRIED * GROUP else torch.get_num_threads())
    *of_guesses, of_none = right
    return None if of_none else Packed(data, bits, tuple(of_guesses))


def reference(weight: Tensor, bits: int, guesses: Sequence[Guess]) -> Packed | None:
    """The same in plain torch."""
    groups = weight.reshape(-1, GROUP)
    kept: tuple[Tensor, Tensor, Tensor] | None = None
    left, at = groups, torch.empty(0, dtype=torch.int64)  # those that no guess was right for yet
    low, high = groups.amin(1), groups.amax(1)
    count = [0] * len(guesses)
    for number, guess in enumerate(guesses):
        scale, base = guess(low, high)
        wide, start = scale.float()[:, None], base.float()[:, None]
        code = (left - start).div_(torch.where(wide == 0, 1.0, wide)).round_()
        # Exact but for one rounding: a code times a scale has 19 bits.
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
            return Packed(_pack(Codes(codes, scales, bases), bits), bits, tuple(count))
        if count[number]:
            left, low, high = groups[at], low[~right], high[~right]
    return None


def numbers(found: Codes) -> Tensor:
    """The weight in float32."""
    scales, bases = (x.double().repeat_interleave(GROUP, 1) for x in (found.scales, found.bases))
    return (found.codes.double() * scales + bases).float()


def strip_bytes(inputs: int, bits: int) -> int:
    """What OUTPUTS outputs take side by side."""
    return inputs * OUTPUTS * bits // 8 + inputs // GROUP * OUTPUTS * 4


def _pack(found: Codes, bits: int) -> Tensor:
    """``[strips, bytes]``, zeros behind the last output."""
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


def unpack(data: Tensor, inputs: int, bits: int) -> Codes:
    """The codes of ``data [strips, bytes]``, with those behind the last output."""
    strips, groups = len(data), inputs // GROUP
    lines = data.view(strips, groups, -1)
    size = GROUP * OUTPUTS * bits // 8
    codes = lines[..., :size].view(strips, groups, -1, OUTPUTS)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), 3).view(strips, groups, GROUP, OUTPUTS)
    both = lines[..., size:].contiguous().view(torch.float16).view(strips, groups, 2, OUTPUTS)
    scales, bases = both.permute(2, 0, 3, 1).reshape(2, strips * OUTPUTS, groups)
    return Codes(codes.permute(0, 3, 1, 2).reshape(strips * OUTPUTS, inputs), scales, bases)
