"""Sampling parameters, and the sampling state of one request.

``sampler`` processes the logits.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field

import numpy as np
from kvsidecar.errors import InvalidRequest
from numpy.typing import NDArray

from inference_svc.structured_output.grammar_state import GrammarState

# At lower temperatures any difference between two logits makes the less likely token impossible, so sampling is greedy.
GREEDY_BELOW = 1e-5
MAX_TOP_K = 2**31 - 1
_MAX_LOGIT_BIAS = 1024
_GOLDEN, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
# Random numbers per position of the answer.
_TRIES = 64


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
    """Divides positive logits of tokens of the prompt and the answer, and multiplies negative ones (Keskar et al.,
    "CTRL", 2019)."""
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
        _within("repetition_penalty", repetition, 0.0 < repetition <= 10.0, "values above 0, up to 10")
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

    def check(self, vocabulary: int) -> None:
        """Raises InvalidRequest for a token outside the model's vocabulary."""
        for name, ids in (("logit_bias", self.logit_bias), ("allowed_tokens", self.allowed_tokens or ())):
            wrong = next((i for i in ids if i >= vocabulary), None)
            if wrong is not None:
                raise InvalidRequest(f"{name} has token {wrong}, outside the vocabulary of {vocabulary}", param=name)


def _within(name: str, value: float, holds: bool, allowed: str) -> None:
    if not holds:
        raise InvalidRequest(f"{name} is {value}; allowed are {allowed}", param=name)


@dataclass(frozen=True)
class SampledToken:
    """Token with its log probability and the likeliest alternatives, if requested."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptLogprob(SampledToken):
    """Prompt token with its log probability, alternatives and rank (likeliest: 1)."""

    rank: int = 0


class TokenCounts:
    """Distinct tokens of prompt and answer, with their counts in the answer."""

    def __init__(self, prompt: Iterable[int]) -> None:
        known = np.unique(np.fromiter(prompt, np.int64))
        self._at = {int(token): i for i, token in enumerate(known)}
        self._ids, self._generated = known, np.zeros(len(known), np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The distinct tokens ``[n]``."""
        return self._ids[: len(self._at)]

    @property
    def generated(self) -> NDArray[np.float32]:
        """Counts ``[n]`` of the tokens in the answer."""
        return self._generated[: len(self._at)]

    def copy(self) -> TokenCounts:
        other = TokenCounts(())
        other._at, other._ids, other._generated = dict(self._at), self._ids.copy(), self._generated.copy()
        return other

    def add(self, token: int) -> None:
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._ids):
            room = max(16, at)
            self._ids = np.concatenate((self._ids, np.zeros(room, np.int64)))
            self._generated = np.concatenate((self._generated, np.zeros(room, np.float32)))
        self._ids[at] = token
        self._generated[at] += 1


class SamplingState:
    """Sampling state of one request: number and counts of its sampled tokens.

    Only ``accept`` changes it, so a token that is sampled and then dropped has no effect. The random numbers of a
    position in the answer are a function of the seed and the position, so results with a seed do not depend on the rest
    of the batch or on preemptions.
    """

    def __init__(
        self,
        params: SamplingParams,
        logprobs: int | None = None,
        prompt: Iterable[int] = (),
        grammar: GrammarState | None = None,
        stops: Iterable[int] = (),
    ) -> None:
        """``stops`` are the tokens that end the answer."""
        self.params, self.logprobs, self.grammar = params, logprobs, grammar
        self.drawn = 0
        self._stops = sorted(stops) if params.min_tokens else []
        self.counts = TokenCounts(prompt if params.repetition_penalty != 1.0 else ()) if params.counts else None
        self._start = mix(secrets.randbits(64) if params.seed is None else params.seed & _WORD)

    @property
    def is_unmodified(self) -> bool:
        """True if no mask, bias or penalty changes the logits."""
        kept = self.counts is None and self.grammar is None and not self.too_early
        return kept and not self.params.logit_bias and self.params.allowed_tokens is None

    @property
    def plain_greedy(self) -> bool:
        """True if only the argmax of the unmodified logits is needed."""
        return self.logprobs is None and self.params.greedy and self.is_unmodified

    @property
    def too_early(self) -> list[int]:
        """Stop tokens that ``min_tokens`` still forbids."""
        return self._stops if self.drawn < self.params.min_tokens else []

    def uniform(self, attempt: int) -> float:
        """Returns the random number in [0, 1) for an attempt of the next token.

        The number is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) of a
        counter.
        """
        place = self.drawn * _TRIES + attempt % _TRIES + 1
        return (mix(self._start + place * _GOLDEN) >> 11) * 2.0**-53

    @property
    def complete(self) -> bool:
        """True if the answer completes the grammar and no token may follow."""
        return self.grammar is not None and self.grammar.complete

    def ahead(self) -> SamplingState:
        """Returns a copy without grammar and log probabilities, for sampling draft tokens."""
        other = copy(self)
        other.logprobs, other.grammar = None, None
        other.counts = None if self.counts is None else self.counts.copy()
        return other

    def accept(self, token: int) -> None:
        """Records the next token of the answer. Raises GenerationFailed if the grammar does not allow it."""
        self.drawn += 1
        if self.grammar is not None:
            self.grammar.accept(token)
        if self.counts is not None:
            self.counts.add(token)


def mix(word: int) -> int:
    """Computes SplitMix64's finalizer."""
    word &= _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


def min_p_margin(min_p: float) -> float:
    """Returns the logit difference that corresponds to a probability ratio of ``min_p``."""
    return -math.log(min_p) if min_p > 0 else math.inf
