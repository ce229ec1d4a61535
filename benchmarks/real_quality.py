"""Quality of reuse on a real model and real text: ``python -m benchmarks.quality --model smollm2``.

Documents, dialogues and code are stored in another order, and relocated to their places in the prompt. All tokens of
the question and of the full prefill's answer are judged, in float32. Tasks check whether the answer with reuse equals
the answer without reuse. The answer of a control depends on one document; a repair that harms it fails. ``oracle`` has
the true keys and values of the best tokens, so it is the upper bound of any selection.

``cost`` is the work of a repair (rows times layers), as a share of the work to compute all tokens that are not exact.
It excludes the forward pass of the question, which all arms need; ``work`` includes this pass. ``cost_bound`` is the
allowed cost: r + 2 / layers + the question's share + .03. The question's share is in it because a selector computes the
question once to see its attention.

The ``exact`` arms reuse the prompt itself at several bit widths, in float32 and in bfloat16. Each is compared with a
full prefill in the same dtype. ``rounding_bfloat16`` compares a full prefill in bfloat16 with one in float32. An
interrupted run resumes, as with the built-in model.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.checkpointed_results import CheckpointedResults
from benchmarks.quality_statistics import bootstrap_interval
from benchmarks.real_prompts import CONTROLS, TASKS, TEXTS, RealPrompt, RealSamples
from benchmarks.recompute_oracle import FullPrefill, oracle_outcome
from inference_svc.context_reuse.reuse_lab import LabResult, ReuseLab
from inference_svc.context_reuse.selectors import SELECTORS
from inference_svc.context_reuse.verifier import divergence, shuffled_order
from inference_svc.models.loader import load, quiet_transformers

KINDS = (*TEXTS, *TASKS, *CONTROLS)
RATIOS = (0.15, 0.3)
REPAIRS = ("cacheblend", "guided", "salient")
_ANSWER_TOKENS = 16
_EXACT_BITS = {"float32": (16, 8, 4), "bfloat16": (16, 8)}
# A repair may raise the KL of a control by this much, in nats; ``kvsidecar verify`` has the same limit.
_HARM = 0.01

Job = tuple[str, int]


@dataclass(frozen=True)
class PromptResult:
    """Result of one arm for one prompt, compared with the full prefill.

    ``kl`` (nats) and ``same`` have a value for each judged token. ``unchanged`` says that the answer equals the answer
    of the full prefill. ``right`` says that the answer is right; None if the right answer is unknown.
    """

    kl: list[float]
    same: list[bool]
    unchanged: bool
    right: bool | None
    full_right: bool | None
    recomputed: float
    work: float
    question_share: float
    seconds: float
    full_seconds: float

    @classmethod
    def of(cls, full: LabResult, got: LabResult, answer: list[int], gold: bool, share: float) -> PromptResult:
        """Compare an arm's result with the full prefill. Both continue with ``answer``; ``gold`` says it is right."""
        kl, same = divergence(full, got)
        mine, theirs = got.answer_logits.argmax(-1).tolist(), full.answer_logits.argmax(-1).tolist()
        return cls(
            kl=[round(v, 8) for v in kl],
            same=same,
            unchanged=mine == theirs,
            right=mine == answer if gold else None,
            full_right=theirs == answer if gold else None,
            recomputed=round(got.recomputed_ratio, 4),
            work=round(got.cost, 4),
            question_share=round(share, 4),
            seconds=got.seconds,
            full_seconds=full.seconds,
        )


class Measurer:
    """The model in each dtype, and its prompt sampler; a call measures one job."""

    def __init__(self, options: argparse.Namespace) -> None:
        quiet_transformers()
        torch.set_num_threads(options.threads)
        self._options = options
        self._labs = {t: ReuseLab(load(options.model, dtype=t), 4096) for t in ("float32", "bfloat16")}
        self.layers = self._labs["float32"].decoder.layers
        self._samples = RealSamples(self._labs["float32"].loaded.tokenizer)

    def __call__(self, job: Job) -> dict[str, PromptResult]:
        kind, number = job
        rng = random.Random(f"{self._options.seed} {kind} {number}")
        prompt = self._samples.draw(kind, rng)
        found = dict(self._shuffled(prompt, rng))
        if number < self._options.n_exact and kind in TEXTS:
            found |= dict(self._exact(prompt))
        return found

    def _shuffled(self, prompt: RealPrompt, rng: random.Random) -> Iterator[tuple[str, PromptResult]]:
        lab = self._labs["float32"]
        read = lab.documents(prompt.head, prompt.documents)
        tokens, question = read.tokens + prompt.question, len(read.tokens)
        at, gold = np.arange(question, len(tokens)), bool(prompt.answer)
        truth = FullPrefill.of(lab, tokens, question, _ANSWER_TOKENS, prompt.answer)
        full, answer = truth.outcome, truth.outcome.greedy_tokens
        share = len(prompt.question) / (len(tokens) - len(prompt.head))

        def judged(got: LabResult) -> PromptResult:
            return PromptResult.of(full, got, answer, gold, share)

        first, placed = read.stored_in_order(shuffled_order(len(prompt.documents), rng), 16)
        yield "none", judged(lab.reuse(tokens, first, placed, SELECTORS["none"], 0.0, at, answer=answer))
        for ratio in RATIOS:
            for name in REPAIRS:
                got = lab.reuse(tokens, first, placed, SELECTORS[name], ratio, at, answer=answer)
                yield f"{name}_r{ratio:g}", judged(got)
            yield f"oracle_r{ratio:g}", judged(oracle_outcome(lab, truth, tokens, first, placed, ratio, at, answer))

    def _exact(self, prompt: RealPrompt) -> Iterator[tuple[str, PromptResult]]:
        fulls: dict[str, LabResult] = {}
        answer: list[int] = []
        for dtype, lab in self._labs.items():
            read = lab.documents(prompt.head, prompt.documents)
            tokens = read.tokens + prompt.question
            at = np.arange(len(read.tokens), len(tokens))
            fulls[dtype] = full = lab.full_prefill(tokens, at, go_on=_ANSWER_TOKENS, answer=answer)
            answer = full.greedy_tokens
            for bits, chunks in zip(_EXACT_BITS[dtype], read.stored_at(_EXACT_BITS[dtype]), strict=True):
                got = lab.reuse(tokens, chunks, [], SELECTORS["none"], 0.0, at, answer=answer)
                yield f"exact_{bits}bit_{dtype}", PromptResult.of(full, got, answer, False, 1.0)
        yield "rounding_bfloat16", PromptResult.of(fulls["float32"], fulls["bfloat16"], answer, False, 1.0)


def row(arm: str, task: str, found: list[PromptResult]) -> dict[str, Any]:
    """Return the result row of one arm for the prompts of a kind."""
    kl, same = (np.concatenate([getattr(f, name) for f in found]) for name in ("kl", "same"))
    prompt = np.repeat(np.arange(len(found)), [len(f.kl) for f in found])
    known = [f for f in found if f.right is not None]
    seconds, full = (report.median([getattr(f, n) for f in found]) for n in ("seconds", "full_seconds"))
    return {
        "arm": arm,
        "task": task,
        "n": len(found),
        "accuracy": round(float(np.mean([f.right for f in known])), 4) if known else None,
        "accuracy_full": round(float(np.mean([f.full_right for f in known])), 4) if known else None,
        "unchanged_answers": round(float(np.mean([f.unchanged for f in found])), 4),
        "kl_mean": round(float(kl.mean()), 8),
        "kl_95": [round(v, 6) for v in bootstrap_interval(kl, prompt)],
        "kl_p99": round(float(np.quantile(kl, 0.99)), 6),
        "top1_agreement": round(float(same.mean()), 4),
        "flips": int((~same).sum()),
        "recomputed_ratio": round(float(np.mean([f.recomputed for f in found])), 4),
        "cost": round(float(np.mean([max(0.0, f.work - f.question_share) for f in found])), 4),
        "work": round(float(np.mean([f.work for f in found])), 4),
        "question_share": round(float(np.mean([f.question_share for f in found])), 4),
        "ttft_ratio": round(seconds / full, 3),
    }


def summary(rows: list[dict[str, Any]], layers: int) -> dict[str, Any]:
    """Return three results of each repair: the regained share of the loss of ``none``, the harm on controls, the cost.

    Shares and costs are means over the kinds of text.
    """
    found = {(r["arm"], r["task"]): r for r in rows}
    out: dict[str, Any] = {}
    for ratio in RATIOS:
        for name in (*REPAIRS, "oracle"):
            arm = f"{name}_r{ratio:g}"
            shares = [1 - found[arm, t]["kl_mean"] / found["none", t]["kl_mean"] for t in TEXTS if (arm, t) in found]
            harm = [found[arm, t]["kl_mean"] - found["none", t]["kl_mean"] for t in CONTROLS if (arm, t) in found]
            mine = [found[arm, t] for t in TEXTS if (arm, t) in found]
            out[f"regained_{arm}"] = round(float(np.mean(shares)), 3)
            out[f"regained_least_{arm}"] = round(min(shares), 3)
            out[f"control_harm_{arm}"] = round(max(harm), 5)
            out[f"control_harmed_{arm}"] = max(harm) > _HARM
            if name != "oracle":
                out[f"cost_{arm}"] = round(float(np.mean([r["cost"] for r in mine])), 4)
                share = float(np.mean([r["question_share"] for r in mine]))
                out[f"cost_bound_{arm}"] = round(ratio + 2 / layers + share + 0.03, 4)
    for arm in dict.fromkeys(a for a, _ in found if a.startswith(("exact", "rounding"))):
        mine = [found[arm, t] for t in TEXTS if (arm, t) in found]
        out[f"kl_{arm}"] = float(np.mean([r["kl_mean"] for r in mine]))
        out[f"flips_{arm}"] = sum(r["flips"] for r in mine)
    return out


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the prompts that the checkpoint lacks, and write all results."""
    kept = CheckpointedResults(options.out.with_suffix(".partial.jsonl") if options.out else None, options)
    found = [((job[0], job[1]), {a: PromptResult(**f) for a, f in arms.items()}) for job, arms in kept.read()]
    found = [(job, arms) for job, arms in found if job[1] < options.n]
    kept.write([(job, _plain(arms)) for job, arms in found])
    done = {job for job, _ in found}
    jobs = [(kind, i) for i in range(options.n) for kind in KINDS if (kind, i) not in done]
    measurer = Measurer(options)
    with report.progress() as progress:
        bar = progress.add_task("measuring", total=len(jobs) + len(done), completed=len(done))
        for job in jobs:
            arms = measurer(job)
            kept.add(job, _plain(arms))
            found.append((job, arms))
            progress.advance(bar)
    collected: dict[tuple[str, str], list[PromptResult]] = {}
    for (kind, _), arms in sorted(found, key=lambda one: (KINDS.index(one[0][0]), one[0][1])):
        for arm, one in arms.items():
            collected.setdefault((arm, kind), []).append(one)
    rows = [row(arm, kind, each) for (arm, kind), each in collected.items()]
    shown = ("arm", "task", "n", "accuracy", "unchanged_answers", "kl_mean", "top1_agreement", "cost")
    result = report.write(options, "quality", rows, summary(rows, measurer.layers), shown)
    kept.forget()
    return result


def _plain(arms: dict[str, PromptResult]) -> dict[str, Any]:
    return {arm: asdict(one) for arm, one in arms.items()}
