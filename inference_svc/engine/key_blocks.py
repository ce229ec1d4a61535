"""How many keys attention must read for a row to get the same bits whatever is computed with it.

torch's flash attention on the CPU works through the keys in blocks of 512 and gives a row the same bits whenever their
number is a multiple of that; what is behind a sequence's end is masked, and adds exact zeros. A short last block would
do as well, if only its sums were made in the same order. For some lengths they are (up to 192 and from 384 on, on the
one machine that was measured), which is found out here, once per process.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_svc.engine.pool import KEY_BLOCK

_STEP = 64
# Rows that take different ways through the kernel: single ones, short and long blocks of queries.
_PROBE_ROWS = (4, 8, 28, 128, 512)


@cache
def last_blocks(dtype: torch.dtype, dim: int, threads: int) -> tuple[int, ...]:
    """Lengths of the last block that give the bits of a whole one, rising, KEY_BLOCK the last.

    ``threads`` is how many torch computes with on this thread; it is what the answer holds for.
    """
    del threads
    found = [n for n in range(_STEP, KEY_BLOCK, _STEP) if all(_same(n, rows, dtype, dim) for rows in _PROBE_ROWS)]
    return (*found, KEY_BLOCK)


def padded_keys(keys: int, blocks: tuple[int, ...]) -> int:
    """The least number of keys, from ``keys`` on, whose last block is one of ``blocks``."""
    whole = (keys - 1) // KEY_BLOCK * KEY_BLOCK
    return whole + next(n for n in blocks if n >= keys - whole)


def _same(length: int, rows: int, dtype: torch.dtype, dim: int) -> bool:
    """Whether rows that see as many keys as fit into a last block of ``length`` get the same bits from a whole one."""
    for whole in (0, KEY_BLOCK):
        for keys in (whole + length, whole + length - _STEP + 1):
            for probe in (_cancelling, _ordinary):
                q, k, v = probe(rows, whole + KEY_BLOCK, keys, dim, torch.Generator().manual_seed(keys))
                found = [_attended(q, k[:n], v[:n], keys, dtype) for n in (whole + length, whole + KEY_BLOCK)]
                if not torch.equal(*found):
                    return False
    return True


def _cancelling(rows: int, size: int, keys: int, dim: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """All scores are equal, and the values, of very different sizes, occur with both signs: their sums are nothing but
    rounding errors, which are others for every order."""
    order = torch.randperm(keys, generator=random)
    half = keys // 2
    sizes = torch.exp2(torch.randint(-10, 11, (half, dim), generator=random).float())
    values = torch.zeros(size, dim)
    values[order[:half]] = torch.randn(half, dim, generator=random) * sizes
    values[order[half : 2 * half]] = -values[order[:half]]
    return torch.zeros(rows, dim), torch.zeros(size, dim), values


def _ordinary(rows: int, size: int, keys: int, dim: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Scores and values as models have them."""
    q, k, v = (torch.randn(n, dim, generator=random) for n in (rows, size, size))
    return q, k, v


def _attended(q: Tensor, k: Tensor, v: Tensor, keys: int, dtype: torch.dtype) -> Tensor:
    """Attention of ``q [rows, dim]`` over the first ``keys`` of ``k`` and ``v [padded keys, dim]``."""
    mask = torch.zeros(len(q), len(k), dtype=dtype)
    mask[:, keys:] = float("-inf")
    q, k, v = (x.to(dtype)[None, None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
