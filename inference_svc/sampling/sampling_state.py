"""Sampling state of one request: its random numbers, token counts and grammar."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

from inference_svc.sampling.penalties import TokenCounts
from inference_svc.sampling.sampling_params import SamplingParams
from inference_svc.sampling.seeded_rng import SeededRng
from inference_svc.structured_output.grammar_state import GrammarState


class SamplingState:
    """Sampling state of one request: number and counts of its sampled tokens.

    Only ``accept`` changes the state, so a token that is sampled and then dropped has no effect.
    """

    def __init__(
        self,
        params: SamplingParams,
        logprobs: int | None = None,
        prompt: Iterable[int] = (),
        grammar: GrammarState | None = None,
        stops: Iterable[int] = (),
        logprob_tokens: tuple[int, ...] = (),
    ) -> None:
        """``stops`` are the tokens that end the answer; ``GenerationRequest`` describes the other parameters."""
        self.params, self.logprobs, self.grammar = params, logprobs, grammar
        self.logprob_tokens = logprob_tokens
        self.drawn = 0
        self._stops = sorted(stops) if params.min_tokens else []
        self.counts = TokenCounts(prompt if params.repetition_penalty != 1.0 else ()) if params.counts else None
        self._rng = SeededRng(params.seed)

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
        """Returns the random number in [0, 1) for an attempt of the next token."""
        return self._rng.uniform(self.drawn, attempt)

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
