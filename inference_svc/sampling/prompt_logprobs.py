"""How likely a prompt's own tokens are, for requests that ask for it: ``echo`` and ``prompt_logprobs``.

The logits of a row are as wide as the vocabulary, so a pass scores few. Such a prompt is computed from its beginning,
whatever had been read before: keys and values tell nothing of what the model expected. Only the engine's thread uses
this.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from inference_svc.engine.sequence import Sequence
from inference_svc.model_runner.forward_batch import SequenceSlice
from inference_svc.sampling.sampling_params import PromptLogprob

# Rows that are scored in one pass, and of these in one piece in float32.
MAX_SCORED_ROWS, _PIECE = 128, 16


def row_budget(sequences: Iterable[Sequence]) -> dict[Sequence, int]:
    """How many tokens are computed in one pass of those that are scored, the oldest first; none of the last ones."""
    left, found = MAX_SCORED_ROWS, dict[Sequence, int]()
    for sequence in sorted((s for s in sequences if rows_to_score(s, s.missing)), key=lambda s: s.arrived):
        found[sequence] = min(sequence.missing, left)
        left -= found[sequence]
    return found


def rows_to_score(sequence: Sequence, count: int) -> int:
    """Of the next ``count`` tokens to compute, how many the prompt goes on behind; none when all are scored."""
    scores, last = sequence.prompt_scores, sequence.prompt_tokens - 1
    if sequence.prompt_logprobs is None or len(scores) == last:
        return 0
    return max(0, min(sequence.computed + count, last) - sequence.computed)


@torch.inference_mode()
def collect(spans: list[tuple[Sequence, SequenceSlice]], logits: Tensor) -> Tensor:
    """Notes how likely prompts' tokens are by the rows that were to be scored; returns the other rows of ``logits
    [wanted, vocabulary]``. May be called again for the same spans."""
    if not any(span.scored for _, span in spans):
        return logits
    kept: list[int] = []
    at = 0
    for sequence, span in spans:
        if span.scored:
            following = sequence.tokens[span.start + 1 : span.start + 1 + span.scored]
            del sequence.prompt_scores[span.start :]
            for first in range(0, span.scored, _PIECE):
                some = following[first : first + _PIECE]
                rows = logits[at + first : at + first + len(some)]
                sequence.prompt_scores += _scores(rows, some, sequence.prompt_logprobs or 0)
        at += span.scored
        wanted = 1 + span.guessed if span.wants_logits else 0
        kept += range(at, at + wanted)
        at += wanted
    return logits[kept]


def _scores(logits: Tensor, tokens: list[int], most: int) -> list[PromptLogprob]:
    """Each of ``tokens`` by its row of ``logits [tokens, vocabulary]``."""
    lines = torch.log_softmax(logits.float(), -1)
    own = lines.gather(1, torch.tensor(tokens, device=lines.device)[:, None])
    ranks = ((lines > own).sum(-1) + 1).tolist()
    top = torch.topk(lines, min(most, lines.shape[1]))
    alternatives = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        PromptLogprob(token, logprob, tuple(zip(ids, values, strict=True)), rank)
        for token, logprob, rank, (ids, values) in zip(tokens, own[:, 0].tolist(), ranks, alternatives, strict=True)
    ]
