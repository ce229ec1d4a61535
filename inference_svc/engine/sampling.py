"""Per-request sampling: temperature, top-k, top-p, penalties, seeds, log probabilities."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass

import torch
from kvsidecar.errors import InvalidRequest
from torch import Tensor


def likeliest(logits: Tensor) -> list[int]:
    """The first likeliest token of each row of ``logits [rows, vocabulary]``.

    On the CPU by NumPy: torch needs 2 ms for 8 bfloat16 rows of 150k, this 0.1 ms.
    """
    on_cpu = logits.device.type == "cpu"
    ids: list[int] = (logits.float().numpy().argmax(-1) if on_cpu else logits.argmax(-1)).tolist()
    return ids


@dataclass(frozen=True)
class SamplingParams:
    """How one request draws its tokens. Raises InvalidRequest when a value is out of range."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 2.0:
            raise InvalidRequest(f"temperature is {self.temperature}; allowed are 0 (greedy) to 2")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p is {self.top_p}; allowed are values above 0, up to 1")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k is {self.top_k}; allowed are 0 (all) and above")
        for name, value in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not -2.0 <= value <= 2.0:
                raise InvalidRequest(f"{name}_penalty is {value}; allowed are -2 to 2")


@dataclass(frozen=True)
class Drawn:
    """A token, with its log probability and the likeliest alternatives where asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Draws the tokens of one request. Repeatable with a seed, whatever else is in the batch."""

    def __init__(self, params: SamplingParams, logprobs: int | None) -> None:
        self._params, self._logprobs = params, logprobs
        self._generator = torch.Generator()
        self._generator.manual_seed(secrets.randbits(63) if params.seed is None else params.seed & (2**63 - 1))
        self._seen: Counter[int] = Counter()

    @property
    def plain_greedy(self) -> bool:
        """The likeliest token is all that is wanted."""
        p = self._params
        return p.temperature == 0.0 and self._logprobs is None and not (p.presence_penalty or p.frequency_penalty)

    def draw(self, logits: Tensor) -> Drawn:
        """``logits [vocabulary]`` of one row, on any device; not changed."""
        p = self._params
        penalized = logits
        if self._seen and (p.presence_penalty or p.frequency_penalty):
            penalized = logits.float().clone()
            ids = torch.tensor(list(self._seen), device=logits.device)
            counts = torch.tensor(list(self._seen.values()), dtype=torch.float32, device=logits.device)
            penalized[ids] -= p.presence_penalty + p.frequency_penalty * counts
        token = likeliest(penalized[None])[0] if p.temperature == 0.0 else self._sample(penalized)
        if p.presence_penalty or p.frequency_penalty:
            self._seen[token] += 1
        if self._logprobs is None:
            return Drawn(token)
        scores = torch.log_softmax(logits.float(), -1)
        top = torch.topk(scores, self._logprobs) if self._logprobs else None
        alternatives = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top else ()
        return Drawn(token, float(scores[token]), alternatives)

    def _sample(self, logits: Tensor) -> int:
        p = self._params
        scores = logits.float().cpu() / p.temperature
        if p.top_k and p.top_k < scores.numel():
            kept = torch.topk(scores, p.top_k)
            scores = torch.full_like(scores, float("-inf")).scatter_(0, kept.indices, kept.values)
        if p.top_p < 1.0:
            ordered, order = torch.sort(scores, descending=True)
            probabilities = torch.softmax(ordered, -1)
            # A token stays when the likelier ones together are below top_p: the first always does.
            drop = probabilities.cumsum(-1) - probabilities >= p.top_p
            scores[order[drop]] = float("-inf")
        return int(torch.multinomial(torch.softmax(scores, -1), 1, generator=self._generator))
