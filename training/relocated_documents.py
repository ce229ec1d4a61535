"""Training on relocated documents: read in another order than their positions.

A cache without repair provides such keys and values. A control task must be answerable from them: the facts that
documents state about each other may be stale, but their positions are right. Each document's keys are computed in the
reading order and get a RoPE shift to their positions; the questions then attend to them.
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
class DocumentRow:
    """A row in parts: ``documents`` in positional order, and the tail.

    The first document stays first. ``learned`` are the indices of the tail's tokens that the model learns to predict.
    """

    documents: list[list[int]]
    tail: list[int]
    learned: list[int]


def tails(model: Any, rows: Sequence[DocumentRow], rng: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """Read each row's documents in a random order, then its tail.

    Returns hidden states ``[rows, longest tail, width]``, the tail's token ids and a mask of the learned ones, both
    ``[rows, longest tail]``.
    """
    device = model.device
    read = [_reading_order(row, rng) for row in rows]
    ids, seen = _padded([tokens for tokens, _ in read], device)
    moved, _ = _padded([moves for _, moves in read], device)
    stored = model.model(ids, attention_mask=seen, use_cache=True).past_key_values
    cache = DynamicCache()
    for layer, part in enumerate(stored.layers):
        cache.update(_rope_shifted(model, part.keys, moved), part.values, layer)
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


def _reading_order(row: DocumentRow, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return the documents' tokens in reading order and each token's shift."""
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


def _rope_shifted(model: Any, keys: Tensor, moved: Tensor) -> Tensor:
    """Apply a RoPE shift by ``moved [rows, tokens]`` positions to keys ``[rows, heads, tokens, dim]``."""
    with torch.autocast(keys.device.type, enabled=False):
        cosine, sine = (x[:, None] for x in model.model.rotary_emb(keys.float(), moved))
        first, second = keys.float().chunk(2, -1)
        return (keys.float() * cosine + torch.cat((-second, first), -1) * sine).to(keys.dtype)


def _padded(rows: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad rows on the right to ``[rows, longest]``; also return the mask of real values."""
    longest = max(map(len, rows))
    parts = [torch.tensor(row) for row in rows]
    values = torch.stack([F.pad(part, (0, longest - len(part)), value=_PADDING) for part in parts])
    real = torch.stack([F.pad(torch.ones_like(part), (0, longest - len(part))) for part in parts])
    return values.to(device), real.to(device)
