"""Statistics of an arm's answers: accuracy, divergence, paired tests, intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks import report
from inference_svc.context_reuse.reuse_lab import LabResult

_BOOTSTRAPS = 1000


@dataclass(frozen=True)
class PromptRecord:
    """Result of one arm for one prompt, and of the prompt's full prefill.

    The lists have a value for each question. ``gap`` is the margin in nats between the first and second choice of the
    full prefill.
    """

    right: list[bool]
    full_right: list[bool]
    same: list[bool]
    kl: list[float]
    loss: list[float]
    full_loss: list[float]
    gap: list[float]
    recomputed: float
    seconds: float
    full_seconds: float

    @classmethod
    def of(cls, gold: Sequence[int], full: LabResult, got: LabResult) -> PromptRecord:
        """Compare an arm's result with the full prefill. ``gold`` are the expected tokens."""
        target = torch.tensor(gold)
        p, q = full.logits.log_softmax(-1), got.logits.log_softmax(-1)

        def values(x: torch.Tensor) -> list[float]:
            return [round(v, 7) for v in x.tolist()]

        return cls(
            right=(q.argmax(-1) == target).tolist(),
            full_right=(p.argmax(-1) == target).tolist(),
            same=(q.argmax(-1) == p.argmax(-1)).tolist(),
            kl=values((p.exp() * (p - q)).sum(-1)),
            loss=values(-q.gather(1, target[:, None])[:, 0]),
            full_loss=values(-p.gather(1, target[:, None])[:, 0]),
            gap=values(-p.topk(2).values.diff(dim=-1)[:, 0]),
            recomputed=got.recomputed_ratio,
            seconds=got.seconds,
            full_seconds=full.seconds,
        )


@dataclass
class ArmStatistics:
    """Records of one arm for one task."""

    records: list[PromptRecord] = field(default_factory=list)

    def row(self, arm: str, task: str) -> dict[str, Any]:
        """Return the result row. Intervals and tests compare each answer with the one of the full prefill."""
        right, full_right = self._all("right"), self._all("full_right")
        loss, full_loss = self._all("loss"), self._all("full_loss")
        kl = self._all("kl")
        worse, better = int((full_right & ~right).sum()), int((right & ~full_right).sum())
        prompt = np.repeat(np.arange(len(self.records)), [len(r.right) for r in self.records])
        low, high = bootstrap_interval(right.astype(float) - full_right.astype(float), prompt)
        seconds = report.median([r.seconds for r in self.records])
        return {
            "arm": arm,
            "task": task,
            "n": len(self.records),
            "questions": len(right),
            "accuracy": round(float(right.mean()), 4),
            "accuracy_full": round(float(full_right.mean()), 4),
            "difference_95": [round(low, 4), round(high, 4)],
            "flips": worse + better,
            "flips_gap_max": round(float(self._all("gap")[right != full_right].max(initial=0.0)), 4),
            "mcnemar_p": round(_mcnemar(worse, better), 5),
            "kl_mean": round(float(kl.mean()), 6),
            "kl_p99": round(float(np.quantile(kl, 0.99)), 6),
            "top1_agreement": round(float(self._all("same").mean()), 4),
            "perplexity_change": round(math.exp(loss.mean() - full_loss.mean()) - 1, 6),
            "recomputed_ratio": round(float(np.mean([r.recomputed for r in self.records])), 4),
            "ttft_ratio": round(seconds / report.median([r.full_seconds for r in self.records]), 3),
        }

    def _all(self, name: str) -> np.ndarray[Any, Any]:
        return np.asarray([value for record in self.records for value in getattr(record, name)])


def bootstrap_interval(values: np.ndarray[Any, Any], prompt: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean; resampling keeps the values of a prompt together."""
    sums, counts = np.bincount(prompt, values), np.bincount(prompt)
    drawn = np.random.default_rng(0).integers(0, len(sums), (_BOOTSTRAPS, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def _mcnemar(worse: int, better: int) -> float:
    """Return the two-sided p value of McNemar's exact test."""
    n, k = worse + better, min(worse, better)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0
