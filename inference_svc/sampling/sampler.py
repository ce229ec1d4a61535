"""Sampler: logits to tokens, for all rows of a batch at once.

Greedy rows need one argmax. The other rows share one call of each logits processor, on a copy of their logits.

top_p needs no sort of the vocabulary (rejection sampling; Ye et al., "FlashInfer", 2025, sorting-free sampling). The
sampler samples a token from the distribution after temperature, min_p and top_k. It accepts the token if all likelier
tokens together have a probability below top_p. Otherwise it removes this token and all tokens that are not likelier,
and samples again. Accepted tokens have the same distribution as tokens sampled from the top_p nucleus. A row's token
depends only on that row.

On CPUs, a row with top_k is sampled in the same steps from its k tokens instead of the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import inf, isfinite

import numpy as np
import torch
import torch.nn.functional as F
from kvkernels.cpu.head_rows import Likeliest
from kvsidecar.errors import GenerationFailed, GrammarFailed
from torch import Tensor

from inference_svc.sampling.logits_masks import apply_logit_bias, apply_masks
from inference_svc.sampling.logprobs import SampledToken, add_logprobs
from inference_svc.sampling.penalties import apply_penalties
from inference_svc.sampling.sampling_params import min_p_margin
from inference_svc.sampling.sampling_state import SamplingState

# Probabilities are summed in blocks of 512 tokens: sampling finds first the token's block, then the token in the block.
_BLOCK = 512
# The k largest scores are looked for in those blocks of so many tokens that have the k largest maxima.
_PEAK_BLOCK = 64
_LEAST_FLOAT = torch.finfo(torch.float32).min
SampleResult = SampledToken | GenerationFailed


@torch.inference_mode()
def sample(logits: Tensor, samplers: Sequence[SamplingState], likeliest: Likeliest | None = None) -> list[SampleResult]:
    """Samples a token for each row of ``logits [rows, vocabulary]``, on any device; does not change ``logits``.

    ``likeliest`` is that of these logits, where the model's kernels have found it. A row with NaN or infinity, or
    without an allowed token, gets a GenerationFailed instead.
    """
    if not samplers:
        return []
    plain, others = list[int](), list[int]()
    for i, sampler in enumerate(samplers):
        (plain if sampler.plain_greedy else others).append(i)
    if not others:
        found = _likeliest(logits) if likeliest is None else likeliest
        return [_checked(token, peak) for token, peak in zip(*found, strict=True)]
    out = dict(zip(others, _sample_rows(logits, others, [samplers[i] for i in others]), strict=True))
    if plain:
        tokens, peaks = _likeliest(logits[plain])
        out |= {i: _checked(token, peak) for i, token, peak in zip(plain, tokens, peaks, strict=True)}
    return [out[i] for i in range(len(samplers))]


def _likeliest(logits: Tensor) -> Likeliest:
    """Finds the likeliest tokens.

    Uses NumPy on the CPU: for 8 bfloat16 rows of 150k tokens, torch needs 2 ms and NumPy 0.1 ms.
    """
    if logits.device.type != "cpu":
        peaks, tokens = logits.max(-1)
        return tokens.tolist(), peaks.float().tolist()
    values = logits.float().numpy()
    found = values.argmax(-1)
    return found.tolist(), values[np.arange(len(values)), found].tolist()


def likeliest_beside(logits: Tensor, tokens: Sequence[int]) -> list[int]:
    """Returns the likeliest token of each row of ``logits [rows, vocabulary]``, except the given token."""
    others = logits.to(torch.float32, copy=True)
    others[range(len(tokens)), tokens] = -inf
    return _likeliest(others)[0]


class LogitsNotFinite(GenerationFailed):
    """The logits of a row contain NaN or infinity."""


def _checked(token: int, peak: float) -> SampleResult:
    return SampledToken(token) if isfinite(peak) else _not_finite()


def _not_finite() -> LogitsNotFinite:
    return LogitsNotFinite("the model computed NaN or infinity for this request; nothing can be drawn from that")


def _no_token(sampler: SamplingState) -> GenerationFailed:
    """Builds the error of a row without a token that is both allowed and possible."""
    if sampler.grammar is not None and sampler.params.allowed_tokens is not None:
        why = "allowed_token_ids has no token that the grammar allows here; add such tokens, or leave one of them out"
        return GrammarFailed(why, param="allowed_token_ids")
    return GenerationFailed("no token may be drawn here: none is both allowed and possible")


def _sample_rows(logits: Tensor, rows: list[int], samplers: list[SamplingState]) -> list[SampleResult]:
    """Samples tokens of ``rows`` with masks, biases, penalties and log probabilities."""
    count, vocabulary = len(rows), logits.shape[1]
    chosen = logits if count == len(logits) else logits[rows]
    scores = torch.empty(count, -(-vocabulary // _BLOCK) * _BLOCK, device=logits.device)
    scores[:, :vocabulary], scores[:, vocabulary:] = chosen, -inf
    # The maximum of a row with NaN is NaN, so this one reduction finds all rows that are not finite.
    best = scores.amax(-1)
    sound = torch.isfinite(best).tolist()
    lost = apply_masks(scores, samplers, vocabulary)
    scored = [i for i, s in enumerate(samplers) if s.logprobs is not None and sound[i]]
    plain = torch.log_softmax(scores[scored, :vocabulary], -1) if scored else scores
    apply_logit_bias(scores, samplers)
    apply_penalties(scores, [(s.params, s.counts) for s in samplers])
    if not all(s.is_unmodified for s in samplers):
        best = scores.amax(-1)
    able = torch.isfinite(best).tolist()
    cold = [i for i, s in enumerate(samplers) if s.params.greedy]
    found = [0] * count
    for i, token in zip(cold, _likeliest(scores if len(cold) == count else scores[cold])[0], strict=True):
        found[i] = token
    drawn = [i for i, s in enumerate(samplers) if not s.params.greedy and sound[i] and able[i]]
    if drawn:
        all_of_them = len(drawn) == count
        part, peaks = (scores, best) if all_of_them else (scores[drawn], best[drawn])
        for i, token in zip(drawn, _draw(part, peaks, [samplers[i] for i in drawn]), strict=True):
            found[i] = token
    out: list[SampleResult] = [
        _not_finite() if not sound[i] else SampledToken(found[i]) if able[i] else lost.get(i, _no_token(s))
        for i, s in enumerate(samplers)
    ]
    for line, i in zip(plain, scored, strict=False):
        if able[i]:
            out[i] = add_logprobs(found[i], line, samplers[i].logprobs or 0, samplers[i].logprob_tokens)
    return out


def _draw(scores: Tensor, best: Tensor, samplers: list[SamplingState]) -> list[int]:
    """Samples a token per row of ``scores [rows, padded vocabulary]``, whose maxima are ``best [rows]``.

    Changes ``scores``.
    """
    out = dict[int, int]()
    if scores.device.type == "cpu":
        limited = [i for i, s in enumerate(samplers) if 0 < s.params.top_k < scores.shape[1]]
        out = {i: _sample_top_k(scores[i], float(best[i]), samplers[i]) for i in limited}
    if rest := [i for i in range(len(samplers)) if i not in out]:
        part, peaks = (scores[rest], best[rest]) if out else (scores, best)
        out |= zip(rest, _sample_top_p(part, peaks, [samplers[i] for i in rest]), strict=True)
    return [out[i] for i in range(len(samplers))]


def _sample_top_k(scores: Tensor, best: float, sampler: SamplingState) -> int:
    """Samples a token of a row with top_k on the CPU, as ``_sample_top_p`` does; ``best`` is the row's maximum."""
    params = sampler.params
    tokens, values = _largest(scores, params.top_k)
    kept = values >= best - min_p_margin(params.min_p) * params.temperature
    tokens, weights = tokens[kept], np.exp((values[kept].astype(np.float64) - best) / params.temperature)
    nucleus = params.top_p * weights.sum()
    for attempt in count():
        reached = weights.cumsum()
        target = min(sampler.uniform(attempt) * reached[-1], np.nextafter(reached[-1], 0.0))
        at = int(np.searchsorted(reached, target, side="right"))
        likelier = weights > weights[at]
        if params.top_p == 1.0 or weights[likelier].sum() < nucleus:
            break
        weights[~likelier] = 0.0
    return int(tokens[at])


def _largest(scores: Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens with the k largest scores of a row, in ascending order, and their scores.

    Tokens with the same score as the k-th also belong to them; tokens of a score of -inf do not.
    """
    blocks = scores.view(-1, _PEAK_BLOCK)
    peaks = blocks.amax(-1).numpy()
    chosen = np.flatnonzero(peaks >= _kth_largest(peaks, k))
    values = blocks.numpy()[chosen].ravel()
    kept = np.flatnonzero(values >= _kth_largest(values, k))  # a mask would take five times as long
    return chosen[kept // _PEAK_BLOCK] * _PEAK_BLOCK + kept % _PEAK_BLOCK, values[kept]


def _kth_largest(values: np.ndarray, k: int) -> float:
    """Returns the k-th largest value; if there are fewer, or it is -inf, the least float.

    Sorts negated values: NumPy takes many times as long if equal ones, such as those of masked tokens, come first.
    """
    return max(-float(np.partition(-values, k - 1)[k - 1]), _LEAST_FLOAT) if k <= len(values) else _LEAST_FLOAT


def _sample_top_p(scores: Tensor, best: Tensor, samplers: list[SamplingState]) -> list[int]:
    """Samples a token per row of ``scores [rows, padded vocabulary]``, with top_p. Changes ``scores``.

    ``best [rows]`` are the maxima of the rows.
    """
    weights = _weights(scores, best, samplers)
    blocks = weights.view(len(samplers), -1, _BLOCK)
    nucleus = torch.tensor([s.params.top_p for s in samplers], dtype=torch.float64)
    out = [0] * len(samplers)
    left, totals = list(range(len(samplers))), None
    attempt = 0
    while left:
        part = blocks if len(left) == len(samplers) else blocks[left]
        sums = part.sum(-1).cpu().double()
        reached = sums.cumsum(-1)
        if totals is None:
            totals = reached[:, -1]
        tokens, chances = _inverse_cdf(part, sums, reached, [samplers[i].uniform(attempt) for i in left])
        for i, token in zip(left, tokens, strict=True):
            out[i] = token
        # If a token's own share exceeds 1 - top_p, all likelier tokens together have less than top_p: accept it.
        share = chances / totals[left]
        unsure = [k for k, i in enumerate(left) if nucleus[i] < 1.0 and share[k] <= 1.0 - nucleus[i]]
        if not unsure:
            break
        checked = [left[k] for k in unsure]
        before = _mass_above(blocks, checked, chances[unsure].float()).tolist()
        left = [i for i, mass in zip(checked, before, strict=True) if mass >= nucleus[i] * totals[i]]
        for i in left:
            # The token is outside the nucleus, and so are all tokens that are not likelier.
            row = weights[i]
            row.masked_fill_(row <= row[out[i]], 0.0)
        attempt += 1
    return out


def _mass_above(blocks: Tensor, rows: list[int], limits: Tensor) -> Tensor:
    """Sums the weights above a limit in ``rows`` of ``blocks [rows, blocks, block]``; returns them on the host."""
    if blocks.device.type == "cpu":  # one row at a time, because a row fits the CPU's cache
        each = zip(rows, limits.tolist(), strict=True)
        return torch.stack([F.threshold(blocks[i], limit, 0.0).sum(-1).double().sum() for i, limit in each])
    lines = blocks[rows]
    return (lines * (lines > limits.to(lines.device)[:, None, None])).sum(-1).cpu().double().sum(-1)


def _weights(scores: Tensor, best: Tensor, samplers: list[SamplingState]) -> Tensor:
    """Returns probabilities ``[rows, padded vocabulary]`` after temperature, min_p and top_k."""
    params = [s.params for s in samplers]
    device = scores.device
    least = best - torch.tensor([min_p_margin(p.min_p) * p.temperature for p in params], device=device)
    if any(p.temperature != 1.0 for p in params):
        temperatures = torch.tensor([p.temperature for p in params], device=device)
        scores /= temperatures[:, None]
        least /= temperatures
    limited = [i for i, p in enumerate(params) if 0 < p.top_k < scores.shape[1]]
    if limited:  # not on a CPU
        ks = torch.tensor([params[i].top_k for i in limited], device=device)
        ranked = torch.topk(scores[limited], max(params[i].top_k for i in limited)).values
        # Tokens with the same logit as the k-th token also remain.
        least[limited] = torch.maximum(least[limited], ranked.gather(1, ks[:, None] - 1)[:, 0])
    if torch.isfinite(least).any():
        scores.masked_fill_(scores < least[:, None], -inf)
    return torch.softmax(scores, -1)


def _inverse_cdf(part: Tensor, sums: Tensor, reached: Tensor, uniforms: list[float]) -> tuple[list[int], Tensor]:
    """Samples a token per row by the inverse CDF; returns the tokens and their weights.

    A row's token is the first at which the running sum of ``part [rows, blocks, block]`` exceeds the row's uniform
    number times the total. ``sums [rows, blocks]`` and their running sum ``reached`` are on the host.
    """
    rows = torch.arange(len(uniforms))
    target = torch.tensor(uniforms, dtype=torch.float64) * reached[:, -1]
    block = (reached <= target[:, None]).sum(-1).clamp_max(reached.shape[1] - 1)
    rest = target - (reached[rows, block] - sums[rows, block])
    lines = part[rows.to(part.device), block.to(part.device)].cpu().double()
    inside = (lines.cumsum(-1) <= rest[:, None]).sum(-1)
    # The two sums may differ in the last bit, so the target may lie behind the block: then take its last weighted
    # token.
    last = lines.shape[1] - 1 - (lines > 0).flip(-1).int().argmax(-1)
    inside = torch.minimum(inside, last)
    return (block * part.shape[2] + inside).tolist(), lines[rows, inside]
