"""Training on relocated documents, whose keys and values were computed in another order.

Approximate reuse without repair provides such keys and values. A document's own facts and its position in the prompt
are right, but its keys and values reflect the wrong earlier documents. The model must still answer the control tasks
from them. So the model first reads the documents in a random order. Each document's keys then get a RoPE shift to the
document's position in the prompt, and the questions attend to them.
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
    """A training row in parts: the documents in the order of the prompt, and the tail with the questions.

    The first document always stays first. ``learned`` has the indices of the tail's tokens that the model learns to
    predict.
    """

    documents: list[list[int]]
    tail: list[int]
    learned: list[int]


def tails(model: Any, rows: Sequence[DocumentRow], rng: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """Run the model over each row's documents in a random order, then over the row's tail.

    Returns the hidden states ``[rows, longest tail, width]``, the tails' token ids ``[rows, longest tail]``, and the
    mask of the learned tokens ``[rows, longest tail]``.
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
    """Return the documents' tokens in a random reading order, and the shift of each token to its position."""
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
    """Shift keys ``[rows, heads, tokens, dim]`` by ``moved [rows, tokens]`` positions."""
    with torch.autocast(keys.device.type, enabled=False):
        cosine, sine = (x[:, None] for x in model.model.rotary_emb(keys.float(), moved))
        first, second = keys.float().chunk(2, -1)
        return (keys.float() * cosine + torch.cat((-second, first), -1) * sine).to(keys.dtype)


def _padded(rows: Sequence[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad rows on the right to ``[rows, longest]``; also return the mask of the values that are no padding."""
    longest = max(map(len, rows))
    parts = [torch.tensor(row) for row in rows]
    values = torch.stack([F.pad(part, (0, longest - len(part)), value=_PADDING) for part in parts])
    real = torch.stack([F.pad(torch.ones_like(part), (0, longest - len(part))) for part in parts])
    return values.to(device), real.to(device)
