"""What reuse does to answers: accuracy on tasks that need other chunks, divergence and perplexity on text.

A sample is a prompt of documents with questions. ``exact`` arms store the prompt itself at so many bits and reuse it as
a prefix; all others store its documents as they were in another order, put them at their places and repair them. Every
arm is compared, question by question, with a full prefill by the same engine. ``full_pieces`` is that prefill in other
piece sizes: the noise floor. The gates say whether the benchmark can tell anything at all.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from benchmarks import report
from inference_svc.model.loader import load, quiet_transformers
from inference_svc.reuse.laboratory import Laboratory, Outcome
from inference_svc.reuse.strategies import DEFAULT, STRATEGIES
from training import tasks

TEXT = Path(__file__).parent / "data" / "held_out.jsonl"
CROSS, CONTROLS = ("alias", "two_hop", "relative"), tasks.CONTROLS
RATIOS = (0.05, 0.15, 0.3)
REPAIRS = ("random", "first_k", "selective", "cacheblend", DEFAULT)
_BOOTSTRAPS = 1000


@dataclass(frozen=True)
class Arm:
    """``shuffled`` false: the prompt's own prefix at ``bits``."""

    name: str
    shuffled: bool
    bits: int = 16
    strategy: str = "none"
    ratio: float = 0.0


EXACT = [Arm(f"exact_{bits}bit", False, bits) for bits in (16, 8, 4, 2)]
SHUFFLED = [
    Arm("none", True),
    *(
        Arm(f"{s}_r{r:g}", True, 16, s, r)
        for s in ("random", "first_k", "selective", "cacheblend", DEFAULT)
        for r in RATIOS
    ),
    Arm("cacheblend_r1", True, 16, "cacheblend", 1.0),
    Arm(f"{DEFAULT}_r0.15_8bit", True, 8, DEFAULT, 0.15),
    Arm(f"{DEFAULT}_r0.15_4bit", True, 4, DEFAULT, 0.15),
]


@dataclass(frozen=True)
class Prompt:
    """Documents behind a beginning, then what is asked. ``at`` are the positions whose next token is judged,
    ``gold`` what it should be."""

    head: list[int]
    documents: list[list[int]]
    tail: list[int]
    at: list[int]  # relative to the tail's start
    gold: list[int]

    def tokens(self, order: Sequence[int]) -> list[int]:
        return self.head + [t for i in order for t in self.documents[i]] + self.tail

    def ends(self, order: Sequence[int]) -> list[int]:
        return np.cumsum([len(self.head), *(len(self.documents[i]) for i in order)]).tolist()


@dataclass
class Tally:
    """What an arm did, question by question; ``prompt`` says to which prompt each belongs."""

    right: list[bool] = field(default_factory=list)
    full_right: list[bool] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    full_loss: list[float] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    recomputed: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    full_seconds: list[float] = field(default_factory=list)

    def add(self, prompt: int, gold: list[int], full: Outcome, got: Outcome) -> None:
        target = torch.tensor(gold)
        p, q = full.logits.log_softmax(-1), got.logits.log_softmax(-1)
        self.right += (q.argmax(-1) == target).tolist()
        self.full_right += (p.argmax(-1) == target).tolist()
        self.same += (q.argmax(-1) == p.argmax(-1)).tolist()
        self.kl += (p.exp() * (p - q)).sum(-1).tolist()
        self.loss += (-q.gather(1, target[:, None])[:, 0]).tolist()
        self.full_loss += (-p.gather(1, target[:, None])[:, 0]).tolist()
        self.prompt += [prompt] * len(gold)
        self.recomputed.append(got.recomputed_ratio)
        self.seconds.append(got.seconds)
        self.full_seconds.append(full.seconds)

    def row(self, arm: str, task: str) -> dict[str, Any]:
        worse = sum(f and not r for f, r in zip(self.full_right, self.right, strict=True))
        better = sum(r and not f for f, r in zip(self.full_right, self.right, strict=True))
        low, high = _interval(np.subtract(self.right, self.full_right, dtype=float), np.asarray(self.prompt))
        perplexity = math.exp(np.mean(self.loss)), math.exp(np.mean(self.full_loss))
        return {
            "arm": arm,
            "task": task,
            "n": len(set(self.prompt)),
            "questions": len(self.right),
            "accuracy": round(float(np.mean(self.right)), 4),
            "accuracy_full": round(float(np.mean(self.full_right)), 4),
            "difference_95": [round(low, 4), round(high, 4)],
            "flips": worse + better,
            "mcnemar_p": round(_mcnemar(worse, better), 5),
            "kl_mean": round(float(np.mean(self.kl)), 6),
            "kl_p99": round(float(np.quantile(self.kl, 0.99)), 6),
            "top1_agreement": round(float(np.mean(self.same)), 4),
            "perplexity_change": round(perplexity[0] / perplexity[1] - 1, 6),
            "recomputed_ratio": round(float(np.mean(self.recomputed)), 4),
            "ttft_ratio": round(report.median(self.seconds) / report.median(self.full_seconds), 3),
        }


def _interval(difference: np.ndarray[Any, Any], prompt: np.ndarray[Any, Any]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean difference, prompts drawn whole."""
    ids, inverse = np.unique(prompt, return_inverse=True)
    sums, counts = np.bincount(inverse, difference), np.bincount(inverse)
    drawn = np.random.default_rng(0).integers(0, len(ids), (_BOOTSTRAPS, len(ids)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def _mcnemar(worse: int, better: int) -> float:
    """Exact two-sided p value of McNemar's test."""
    n, k = worse + better, min(worse, better)
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n) if n else 1.0


class Samples:
    """Draws prompts for a model."""

    def __init__(self, lab: Laboratory, facts: int, filler: int) -> None:
        self._tokenizer = lab.loaded.tokenizer
        self._facts, self._filler = facts, filler
        self.texts = [json.loads(line)["text"] for line in TEXT.read_text(encoding="utf-8").splitlines()]

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def task(self, name: str, rng: random.Random) -> Prompt:
        sample = tasks.TASKS[name](rng, rng.randint(3, self._facts), self._filler)
        documents = [self._ids(f"<|doc|> {d.text}") for d in sample.documents]
        tail: list[int] = []
        at, gold = [], []
        for question, answer in zip(sample.questions, sample.answers, strict=True):
            tail += self._ids(f"<|ask|> {question}") + self._ids(f" {answer}")
            at.append(len(tail) - 2)
            gold.append(tail[-1])
        return Prompt(self._ids("<|bos|>"), documents, tail, at, gold)

    def text(self, rng: random.Random, chunk: int = 64, chunks: int = 6, tail: int = 64) -> Prompt:
        """Held-out text cut into chunks; judged is what follows them."""
        while True:
            ids = self._ids(rng.choice(self.texts))
            need = chunk * chunks + tail
            if len(ids) > need:
                break
        start = rng.randrange(len(ids) - need)
        parts = [ids[start + i * chunk : start + (i + 1) * chunk] for i in range(chunks)]
        rest = ids[start + chunk * chunks : start + need]
        return Prompt(self._ids("<|bos|>"), parts, rest, list(range(tail - 1)), rest[1:])


def outcomes(lab: Laboratory, prompt: Prompt, arms: Sequence[Arm], rng: random.Random) -> Iterator[tuple[str, Outcome]]:
    """What each arm gives; first ``full``."""
    order = list(range(len(prompt.documents)))
    tokens, ends = prompt.tokens(order), prompt.ends(order)
    at = np.asarray(prompt.at) + ends[-1]
    yield "full", lab.full(tokens, at)
    yield "full_pieces", lab.full(tokens, at, piece=rng.choice([17, 40, 100]))
    shuffled = order[:]
    while shuffled == order:
        rng.shuffle(shuffled)
    for bits in {a.bits for a in arms if not a.shuffled}:
        chunks = lab.store(tokens[: ends[-1]], ends, bits)
        for arm in (a for a in arms if not a.shuffled and a.bits == bits):
            yield arm.name, lab.reuse(tokens, chunks, [], STRATEGIES["none"], 0.0, at)
    for bits in {a.bits for a in arms if a.shuffled}:
        chunks = lab.store(prompt.tokens(shuffled)[: ends[-1]], prompt.ends(shuffled), bits)
        by_document = dict(zip(shuffled, chunks[1:], strict=True))
        placed = [(ends[i], by_document[i]) for i in order]
        for arm in (a for a in arms if a.shuffled and a.bits == bits):
            yield arm.name, lab.reuse(tokens, chunks[:1], placed, STRATEGIES[arm.strategy], arm.ratio, at)


def gates(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Whether the benchmark has power; a task that the model has not learned proves nothing."""
    found = {(r["arm"], r["task"]): r for r in rows}

    def lost(arm: str, task: str) -> float:
        row = found[arm, task]
        return float(row["accuracy_full"] - row["accuracy"])

    return {
        "gate_full_learned": all(found["none", t]["accuracy_full"] >= 0.95 for t in (*CROSS, *CONTROLS)),
        "gate_none_loses": all(lost("none", t) >= 0.10 for t in CROSS),
        "gate_controls_hold": all(lost("none", t) <= 0.05 for t in CONTROLS),
        "gate_2bit_fails": any(lost("exact_2bit", t) >= 0.05 for t in (*CROSS, *CONTROLS)),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found = {(r["arm"], r["task"]): r for r in rows}
    out: dict[str, Any] = dict(gates(rows))

    def total(arm: str, key: str) -> float:
        return sum(float(found[arm, t][key]) for t in CROSS)

    lost = total("none", "accuracy_full") - total("none", "accuracy")
    for strategy in REPAIRS:
        for ratio in RATIOS:
            arm = f"{strategy}_r{ratio:g}"
            regained = total(arm, "accuracy") - total("none", "accuracy")
            out[f"recovered_{arm}"] = round(regained / lost, 3) if lost > 0 else 1.0
    for bits in (8, 4):
        name = f"exact_{bits}bit"
        mine = [r for r in rows if r["arm"] == name]
        out[f"flips_{name}"] = sum(r["flips"] for r in mine if r["task"] != "text")
        out[f"perplexity_change_{name}"] = found[name, "text"]["perplexity_change"]
    out["flips_noise_floor"] = sum(r["flips"] for r in rows if r["arm"] == "full_pieces" and r["task"] != "text")
    out["cacheblend_r1_kl"] = max(r["kl_mean"] for r in rows if r["arm"] == "cacheblend_r1")
    return out


def run(options: argparse.Namespace) -> dict[str, Any]:
    quiet_transformers()
    lab = Laboratory(load(options.model, dtype=options.dtype), 2048)
    samples = Samples(lab, options.facts, options.filler)
    names = [*tasks.TASKS, "text"]
    rows: list[dict[str, Any]] = []
    with Progress(console=report.console, transient=True) as progress:
        bar = progress.add_task("measuring", total=len(names) * max(options.n, options.n_exact))
        for name in names:
            tallies: dict[str, Tally] = {}
            for i in range(max(options.n, options.n_exact)):
                rng = random.Random(f"{options.seed} {name} {i}")
                prompt = samples.text(rng) if name == "text" else samples.task(name, rng)
                arms = [*(EXACT if i < options.n_exact else []), *(SHUFFLED if i < options.n else [])]
                found = outcomes(lab, prompt, arms, rng)
                _, full = next(found)
                for arm, outcome in found:
                    tallies.setdefault(arm, Tally()).add(i, prompt.gold, full, outcome)
                progress.advance(bar)
            rows += [tally.row(arm, name) for arm, tally in tallies.items()]
    shown = ("arm", "task", "accuracy", "accuracy_full", "flips", "kl_mean", "top1_agreement", "recomputed_ratio")
    return report.write(options, "quality", rows, summary(rows), shown)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("quality", (__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo", help="a trained model with the built-in tokenizer's task words")
    parser.add_argument("--dtype", default="float32", help="float32 shows what reuse does, not what rounding does")
    parser.add_argument("--n", type=int, default=1000, help="prompts per task for the shuffled arms")
    parser.add_argument("--n-exact", type=int, default=1000, help="prompts per task for the exact arms")
    parser.add_argument("--facts", type=int, default=4, help="most facts per prompt; two documents each")
    parser.add_argument("--filler", type=int, default=12, help="most filler words per document")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.quick:
        options.n, options.n_exact = min(options.n, 20), min(options.n_exact, 20)
    return run(options)


if __name__ == "__main__":
    main()
