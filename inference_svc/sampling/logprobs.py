"""Log probabilities of sampled tokens, with their likeliest alternatives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class SampledToken:
    """Token with its log probability and the likeliest alternatives, if requested.

    Not frozen, because each step makes one for every sequence.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class PromptLogprob(SampledToken):
    """Prompt token with its log probability, alternatives and rank (likeliest: 1)."""

    rank: int = 0


LEAST_LOGPROB = -9999.0
"""The log probability of a requested token that is not allowed, as OpenAI reports it: JSON has no infinity."""


def add_logprobs(token: int, line: Tensor, most: int, requested: tuple[int, ...] = ()) -> SampledToken:
    """Adds log probabilities from ``line [vocabulary]``: those of the allowed tokens, at temperature 1.

    The alternatives are the ``requested`` tokens. Without requested tokens, they are the ``most`` likely tokens.
    """
    if requested:
        values = line[list(requested)].clamp(min=LEAST_LOGPROB).tolist()
        return SampledToken(token, float(line[token]), tuple(zip(requested, values, strict=True)))
    if not most:
        return SampledToken(token, float(line[token]))
    top = torch.topk(line, min(most, len(line)))
    likeliest = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return SampledToken(token, float(line[token]), tuple((i, p) for i, p in likeliest if p > float("-inf")))
