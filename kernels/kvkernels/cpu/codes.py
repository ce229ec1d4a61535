"""Weights of checkpoints that were quantized and written out as numbers: their codes, found again.

GGUF's Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 (https://github.com/ggml-org/ggml, ggml-quants.c) give 32 neighbouring inputs of
an output a scale and a base of 16 bits: a number is ``code * scale + base``, rounded once. Where every number of a
weight is one, a sixth to a third of its bytes hold it exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

# Bits of a code, by how a weight is kept.
BITS = {"coded4": 4, "coded8": 8}
# Inputs that share a scale and a base.
GROUP = 32
_LARGEST = {4: 15, 8: 255}
# Outputs that are looked at together, so that what is in between stays in the CPU's caches.
_SLICE = 256
# A few groups say of most weights that they have no codes, and of the others which guess is right.
_TRIED = 256


@dataclass(frozen=True)
class Codes:
    """A weight's: ``codes [outputs, inputs]`` (uint8), ``scales`` and ``bases [outputs, inputs / GROUP]`` (float16)."""

    codes: Tensor
    scales: Tensor
    bases: Tensor
    bits: int


def find(weight: Tensor, widths: Sequence[int] = (4, 8)) -> Codes | None:
    """The codes of a float32 weight ``[outputs, inputs]`` at the first of these widths at which every number has one;
    None without any. A zero may lose its sign, which no sum of products knows."""
    outputs, inputs = weight.shape
    if inputs % GROUP:
        return None
    rows = weight[:: max(1, outputs // 16)].reshape(-1, GROUP)
    few = rows[:: max(1, len(rows) // _TRIED)]
    for bits in widths:
        guesses = _GUESSES[bits]
        of_few = _of_groups(few, bits, guesses)
        if of_few is None:
            continue
        order = [guesses[i] for i in sorted(range(len(guesses)), key=lambda i: -of_few.right[i])]
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for part in torch.split(weight, _SLICE):
            of_part = _of_groups(part.reshape(-1, GROUP), bits, order)
            if of_part is None:
                break
            found.append(of_part.kept)
        else:
            codes, scales, bases = (torch.cat(kind) for kind in zip(*found, strict=True))
            shape = outputs, inputs // GROUP
            return Codes(codes.view(outputs, inputs), scales.view(shape), bases.view(shape), bits)
    return None


# What quantizers may have done: of the lowest and the highest numbers ``[groups]``, the scales and the bases.
Guess = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _centred(steps: int, zero: int, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Q4_0, Q5_0, Q8_0: the strongest number is so many steps away from 0, whose code is ``zero``."""
    scale = (torch.where(high > -low, high, low) / -steps).half()
    return scale, -zero * scale


def _spread(most: int, falling: bool, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Q4_1, Q5_1, and what was centred another way: one end has the code 0, the other ``most``."""
    scale = ((high - low) / most).half()
    return (-scale, high.half()) if falling else (scale, low.half())


def _spreads(most: int, least: int) -> list[Guess]:
    return [partial(_spread, codes, falling) for codes in range(most, least - 1, -1) for falling in (False, True)]


_OF_4: list[Guess] = [partial(_centred, 8, 8), partial(_centred, 7, 8), *_spreads(15, 1)]
_OF_5: list[Guess] = [partial(_centred, 16, 16), partial(_centred, 15, 16), *_spreads(31, 16)]
# A weight that was joined of several may have codes of both widths.
_GUESSES: dict[int, list[Guess]] = {4: _OF_4, 8: [partial(_centred, 127, 128), *_OF_5, *_OF_4]}


@dataclass(frozen=True)
class _Found:
    kept: tuple[Tensor, Tensor, Tensor]  # codes [groups, GROUP], scales and bases [groups]
    right: list[int]  # for how many groups each guess was the first that is


def _of_groups(groups: Tensor, bits: int, guesses: Sequence[Guess]) -> _Found | None:
    """The codes of ``groups [.., GROUP]``; None when one has none."""
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
            return _Found(kept, count)
        if count[number]:
            left, low, high = groups[at], low[~right], high[~right]
    return None


def numbers(found: Codes) -> Tensor:
    """The weight in float32."""
    scales, bases = (x.double().repeat_interleave(GROUP, 1) for x in (found.scales, found.bases))
    return (found.codes.double() * scales + bases).float()


def strip_bytes(inputs: int, outputs: int, bits: int) -> int:
    """What so many outputs take side by side."""
    return inputs * outputs * bits // 8 + inputs // GROUP * outputs * 4


def pack(found: Codes, outputs: int) -> Tensor:
    """As kernels/cpu/dense.cpp reads them: ``[strips of so many outputs, bytes]``, zeros behind the last output."""
    more = -len(found.codes) % outputs
    codes, scales, bases = (F.pad(x, (0, 0, 0, more)) for x in (found.codes, found.scales, found.bases))
    strips, groups = len(codes) // outputs, codes.shape[1] // GROUP
    lines = codes.view(strips, outputs, groups, GROUP)
    if found.bits == 4:
        lines = lines[..., ::2] | lines[..., 1::2] << 4
    both = torch.stack((scales, bases), 1).view(strips, outputs, 2, groups)
    return torch.cat(
        (
            lines.permute(0, 2, 3, 1).reshape(strips, groups, -1),
            both.permute(0, 3, 2, 1).contiguous().view(torch.uint8).view(strips, groups, -1),
        ),
        2,
    ).view(strips, -1)


def unpack(data: Tensor, inputs: int, outputs: int, bits: int) -> Codes:
    """What ``pack`` was given, and what is behind the last output."""
    strips, groups = len(data), inputs // GROUP
    lines = data.view(strips, groups, -1)
    size = GROUP * outputs * bits // 8
    codes = lines[..., :size].view(strips, groups, -1, outputs)
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), 3).view(strips, groups, GROUP, outputs)
    both = lines[..., size:].contiguous().view(torch.float16).view(strips, groups, 2, outputs)
    scales, bases = both.permute(2, 0, 3, 1).reshape(2, strips * outputs, groups)
    return Codes(codes.permute(0, 3, 1, 2).reshape(strips * outputs, inputs), scales, bases, bits)
