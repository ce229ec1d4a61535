"""Sampling parameters of a request, validated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from kvsidecar.errors import InvalidRequest
from torch import Tensor

# At lower temperatures any difference between two logits makes the less likely token impossible, so sampling is greedy.
GREEDY_BELOW = 1e-5
MAX_TOP_K = 2**31 - 1
# Logits that are divided by this and by a small temperature stay finite. Requests carry the value as a float32.
_MIN_REPETITION_PENALTY = float(np.float32(0.01))
_MAX_LOGIT_BIAS = 1024


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Raises InvalidRequest, which names the field, for a bad value.

    The sampler masks tokens that ``allowed_tokens`` or a grammar does not allow, adds biases, applies penalties, and
    divides by the temperature. Then min_p, top_k and top_p, in this order, remove unlikely tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens of the prompt and the answer, and multiplies their negative logits (Keskar et
    al., "CTRL", 2019)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    allowed_tokens: frozenset[int] | None = None
    """Only these tokens are sampled; None for all."""
    min_tokens: int = 0
    """Until this many tokens are sampled, tokens that end the answer are masked, unless no other token is allowed."""

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0 <= self.temperature <= 2.0, "0 (greedy) to 2")
        _within("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "values above 0, up to 1")
        _within("top_k", self.top_k, 0 <= self.top_k <= MAX_TOP_K, f"0 (all) to {MAX_TOP_K}")
        _within("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "0 (all) to 1")
        repetition = self.repetition_penalty
        _within("repetition_penalty", repetition, _MIN_REPETITION_PENALTY <= repetition <= 10.0, "0.01 to 10")
        for name, value in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            _within(f"{name}_penalty", value, -2.0 <= value <= 2.0, "-2 to 2")
        if len(self.logit_bias) > _MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias has {len(self.logit_bias)} tokens; at most {_MAX_LOGIT_BIAS} are allowed",
                param="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            if token < 0 or not -100.0 <= bias <= 100.0:
                raise InvalidRequest(
                    f"logit_bias of token {token} is {bias}; allowed are -100 to 100", param="logit_bias"
                )
        if self.allowed_tokens is not None and (not self.allowed_tokens or min(self.allowed_tokens) < 0):
            raise InvalidRequest("allowed_tokens must name at least one token, and none below 0")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def counts(self) -> bool:
        """True if a penalty needs token counts."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    # The sampler needs these tensors at every step. ``check`` builds them, so that no engine thread does.

    @cached_property
    def allowed_ids(self) -> Tensor:
        """``allowed_tokens`` in ascending order, int64 on the CPU; empty for None."""
        tokens = self.allowed_tokens or frozenset[int]()
        return torch.from_numpy(np.sort(np.fromiter(tokens, np.int64, len(tokens))))

    @cached_property
    def biases(self) -> tuple[Tensor, Tensor]:
        """The tokens of ``logit_bias``, int64, and their biases, float32, on the CPU."""
        ids, values = list(self.logit_bias), list(self.logit_bias.values())
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(values, dtype=torch.float32)

    def check(self, vocabulary: int) -> None:
        """Raises InvalidRequest for a token outside the model's vocabulary."""
        for name, ids in (("logit_bias", self.biases[0]), ("allowed_tokens", self.allowed_ids)):
            wrong = ids[ids >= vocabulary]
            if len(wrong):
                raise InvalidRequest(
                    f"{name} has token {int(wrong[0])}, outside the vocabulary of {vocabulary}", param=name
                )


def _within(name: str, value: float, holds: bool, allowed: str) -> None:
    if not holds:
        raise InvalidRequest(f"{name} is {value}; allowed are {allowed}", param=name)


def valid_defaults(recommended: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those sampling parameters that a model recommends and that a request may have."""
    return {name: value for name, value in recommended.items() if _is_valid(name, value)}


def _is_valid(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except (InvalidRequest, TypeError):  # TypeError: it is no number
        return False
    return True


def min_p_margin(min_p: float) -> float:
    """Returns the logit difference that corresponds to a probability ratio of ``min_p``."""
    return -math.log(min_p) if min_p > 0 else math.inf
