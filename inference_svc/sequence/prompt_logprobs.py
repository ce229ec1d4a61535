"""Prompt logprobs: log probabilities of a prompt's own tokens.

Requested by ``echo`` and ``prompt_logprobs``. A row of logits is as wide as the vocabulary, so a step computes prompt
logprobs of few rows. A prompt with prompt logprobs is computed from its first token even if it is cached, because the
cache has keys and values, but no logits. Only the engine's thread uses this module.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from inference_svc.model_runner.forward_batch import SequenceSlice
from inference_svc.sampling.logprobs import PromptLogprob
from inference_svc.sequence.sequence import Sequence

# Maximum rows with prompt logprobs per step, and maximum rows per float32 softmax.
MAX_SCORED_ROWS, _PIECE = 128, 16


def row_budget(sequences: Iterable[Sequence]) -> dict[Sequence, int]:
    """Maximum rows of this step for each sequence that needs prompt logprobs; 0 for a sequence that must wait.

    The oldest sequence gets rows first.
    """
    left, found = MAX_SCORED_ROWS, dict[Sequence, int]()
    asking = [s for s in sequences if s.request.num_prompt_logprobs is not None]
    for sequence in sorted(asking, key=lambda s: s.request.arrived_at):
        if not rows_to_score(sequence, sequence.num_uncomputed):
            continue
        found[sequence] = min(sequence.num_uncomputed, left)
        left -= found[sequence]
    return found


def rows_to_score(sequence: Sequence, count: int) -> int:
    """Number of the next ``count`` rows whose prompt logprobs are needed; 0 after all are recorded."""
    scores, last = sequence.prompt_logprobs, sequence.request.num_prompt_tokens - 1
    if sequence.request.num_prompt_logprobs is None or len(scores) == last:
        return 0
    return max(0, min(sequence.kv.num_computed + count, last) - sequence.kv.num_computed)


@torch.inference_mode()
def collect(spans: list[tuple[Sequence, SequenceSlice]], logits: Tensor) -> Tensor:
    """Records prompt logprobs and returns the other rows of ``logits [wanted, vocabulary]``.

    May be called again for the same slices, after a failed step.
    """
    if not any(span.num_scored for _, span in spans):
        return logits
    kept: list[int] = []
    at = 0
    for sequence, span in spans:
        if span.num_scored:
            following = sequence.tokens[span.start + 1 : span.start + 1 + span.num_scored]
            del sequence.prompt_logprobs[span.start :]
            for first in range(0, span.num_scored, _PIECE):
                some = following[first : first + _PIECE]
                rows = logits[at + first : at + first + len(some)]
                sequence.prompt_logprobs += _scores(rows, some, sequence.request.num_prompt_logprobs or 0)
        at += span.num_scored
        wanted = 1 + span.num_draft_tokens if span.wants_logits else 0
        kept += range(at, at + wanted)
        at += wanted
    return logits[kept]


def _scores(logits: Tensor, tokens: list[int], most: int) -> list[PromptLogprob]:
    """Computes logprob, rank and ``most`` alternatives of ``tokens`` from ``logits [tokens, vocabulary]``."""
    lines = torch.log_softmax(logits.float(), -1)
    own = lines.gather(1, torch.tensor(tokens, device=lines.device)[:, None])
    ranks = ((lines > own).sum(-1) + 1).tolist()
    top = torch.topk(lines, min(most, lines.shape[1]))
    alternatives = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        PromptLogprob(token, logprob, tuple(zip(ids, values, strict=True)), rank)
        for token, logprob, rank, (ids, values) in zip(tokens, own[:, 0].tolist(), ranks, alternatives, strict=True)
    ]
