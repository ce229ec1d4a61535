"""Oracle of selective recompute, which knows the true keys and values of all tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from inference_svc.context_reuse.reuse_lab import LabResult, ReuseLab, StoredChunk
from inference_svc.context_reuse.reuse_plan import Positions
from inference_svc.model_runner import forward_batch


class _AttentionRecorder:
    """Records the maximum attention probability of each token over the rows of a batch, layer by layer."""

    def __init__(self, tokens: int) -> None:
        self.layers: list[Tensor] = []
        self._tokens = tokens

    def see(self, strongest: Tensor) -> None:
        self.layers.append(strongest[:, : self._tokens].clone())


@dataclass(frozen=True)
class FullPrefill:
    """Full prefill of a prompt: keys and values ``[layers, kv_heads, tokens, head_dim]``, attention and result.

    ``looks [layers, heads, tokens]`` is the maximum attention probability of each token over the question's rows.
    """

    keys: Tensor
    values: Tensor
    looks: Tensor  # the attention
    outcome: LabResult

    @classmethod
    def of(
        cls, lab: ReuseLab, tokens: Sequence[int], question: int, go_on: int = 0, answer: Sequence[int] = ()
    ) -> FullPrefill:
        """Prefill a prompt, whose question begins at index ``question``, and an answer, as ``ReuseLab`` does."""
        with lab.pages(len(tokens) + max(go_on, len(answer))) as table:
            began = time.perf_counter()
            logits = lab.prefill(tokens, table, np.arange(question, len(tokens)))
            outcome = LabResult(
                logits, time.perf_counter() - began, *lab.continue_answer(table, len(tokens), logits, go_on, answer)
            )
            looks = _AttentionRecorder(len(tokens))
            span = forward_batch.SequenceSlice(list(tokens[question:]), question, table, False)
            batch = replace(forward_batch.build_batch([span], lab.pool, lab.loaded.device), observer=looks)
            lab.decoder.advance(lab.decoder.embed(batch), batch, 0, lab.decoder.layers)
            slots = torch.from_numpy(table.slots(0, len(tokens)))
            keys, values = (t.index_select(2, slots) for t in (lab.pool.keys, lab.pool.values))
        return cls(keys, values, torch.stack(looks.layers), outcome)


def oracle_outcome(
    lab: ReuseLab,
    truth: FullPrefill,
    tokens: Sequence[int],
    exact: Sequence[StoredChunk],
    placed: Sequence[tuple[int, StoredChunk]],
    ratio: float,
    logits_at: Positions,
    answer: Sequence[int],
) -> LabResult:
    """Reuse chunks, with the true keys and values of the best tokens.

    ``ratio`` is the share of these tokens. A token's score sums, over layers and heads, the square of its attention
    times the deviation of its values. The cost counts only the question.
    """
    with lab.pages(len(tokens) + len(answer)) as table:
        plan = lab.place_chunks(table, tokens, exact, placed)
        approximate = plan.approximate_positions
        slots = torch.from_numpy(table.slots(0, len(tokens)))
        moved = (truth.values - lab.pool.values.index_select(2, slots)).float().norm(dim=-1)
        per_kv = truth.looks.shape[1] // moved.shape[1]
        score = (truth.looks * moved.repeat_interleave(per_kv, 1)).square().sum((0, 1))[torch.from_numpy(approximate)]
        best = torch.from_numpy(approximate)[score.topk(plan.budget(ratio)).indices]
        lab.pool.keys.index_copy_(2, slots[best], truth.keys.index_select(2, best))
        lab.pool.values.index_copy_(2, slots[best], truth.values.index_select(2, best))
        fresh = plan.uncached_positions
        span = forward_batch.SequenceSlice([tokens[i] for i in fresh], 0, table, False, fresh)
        logits = lab.logits(span, np.flatnonzero(np.isin(fresh, logits_at))).float()
        after = lab.teacher_forced_logits(table, len(tokens), logits, answer)
        cost = len(fresh) / (len(tokens) - plan.exact)
        return LabResult(logits, 0.0, [], after, ratio, cost)
