"""Documents that were read in another order than they stand in, as a cache without repair would hand them out.

A control must be answered from that: what documents say of each other may be stale, the place where each stands is not.
Each document's keys are computed in the reading order and turned to their places; the questions then attend to them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

_PADDING = 0


@dataclass(frozen=True)
class Split:
    """A row in parts: ``documents`` in the order in which they stand, the first of which stays first, and what follows.
    ``learned`` are the indices of the tail's tokens that are to be predicted."""

    documents: list[list[int]]
    tail: list[int]
    learned: list[int]


def tails(model: Any, rows: Sequence[Split], rng: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """Reads each row's documents in a random order and then its tail: hidden states ``[rows, longest tail, width]``,
    the tail's token ids and a mask of those that are learned, both ``[rows, longest tail]``."""
    device = model.device
    read = [_reading_order(row, rng) for row in rows]
    ids, seen = _padded([tokens for tokens, _ in read], device)
    moved, _ = _padded([moves for _, moves in read], device)
    stored = model.model(ids, attention_mask=seen, use_cache=True).past_key_values
    cache = DynamicCache()
    for layer, part in enumerate(stored.layers):
        cache.update(_turned(model, part.keys, moved), part.values, layer)
    asked, real = _padded([row.tail for row in rows], device)
    start = seen.sum(1, keepdim=True)
    positions = start + torch.arange(asked.shape[1], device=device)
    states = model.model(
        asked, attention_mask=torch.cat((seen, real), 1), position_ids=positions, past_key_values=cache
    ).last_hidden_state
    learned = torch.zeros_like(asked, dtype=torch.bool)
    for i, row in enumerate(rows):
        learned[i, row.learned] = True
    return states, asked, learned


def _reading_order(row: Split, rng: random.Random) -> tuple[list[int], list[int]]:
    """The documents' tokens as they are read, and by how much each stands further on."""
    starts, at = [], 0
    for document in row.documents:
        starts.append(at)
        at += len(document)
    order = [0, *rng.sample(range(1, len(starts)), len(starts) - 1)]
    tokens: list[int] = []
    moves: list[int] = []
    for i in order:
        moves += [starts[i] - len(tokens)] * len(row.documents[i])
        tokens += row.documents[i]
    return tokens, moves


def _turned(model: Any, keys: Tensor, moved: Tensor) -> Tensor:
    """Keys ``[rows, heads, tokens, dim]`` turned on by ``moved [rows, tokens]`` places (RoPE)."""
    with torch.autocast(keys.device.type, enabled=False):
        cosine, sine = (x[:, None] for x in model.model.rotary_emb(keys.float(), moved))
        first, second = keys.float().chunk(2, -1)
        return (keys.float() * cosine + torch.cat((-second, first), -1) * sine).to(keys.dtype)


def _padded(rows: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows on the right padded to ``[rows, longest]``, and which of it is real."""
    longest = max(map(len, rows))
    parts = [torch.tensor(row) for row in rows]
    values = torch.stack([F.pad(part, (0, longest - len(part)), value=_PADDING) for part in parts])
    real = torch.stack([F.pad(torch.ones_like(part), (0, longest - len(part))) for part in parts])
    return values.to(device), real.to(device)
