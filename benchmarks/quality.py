"""Quality of reuse: accuracy on tasks whose answers cross documents, divergence and perplexity.

A sample is a prompt of documents with questions. The ``exact`` arms store the prompt itself at several bit widths and
reuse it as a prefix. All other arms store the documents in another order, relocate them and repair them. Every arm is
compared, question by question, with a full prefill by the same engine. ``full_pieces`` is the full prefill in pieces of
another size, which shows the noise floor. The gates check that the benchmark could detect a loss of quality.

For any model but the built-in one, the command runs ``real_quality``.

The benchmark uses ``--processes`` processes with one thread each. With ``--out``, it checkpoints results beside that
file, and an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import real_quality, report
from benchmarks.checkpointed_results import CheckpointedResults, Job
from benchmarks.judged_prompts import EXACT, RATIOS, REPAIRS, SHUFFLED, Arm, PromptSampler, arm_outcomes
from benchmarks.quality_statistics import ArmStatistics, PromptRecord
from inference_svc.context_reuse.reuse_lab import ReuseLab
from inference_svc.models.loader import load, quiet_transformers
from training import tasks

CROSS, CONTROLS = ("alias", "two_hop", "relative"), tasks.CONTROLS

Measured = dict[str, PromptRecord]  # by arm


def arms_of(number: int, options: argparse.Namespace) -> list[Arm]:
    """Return the arms that measure the ``number``-th prompt of a task."""
    return [*(EXACT if number < options.n_exact else []), *(SHUFFLED if number < options.n else [])]


class Measurer:
    """Model and prompt sampler of one process; a call measures one job."""

    def __init__(self, options: argparse.Namespace) -> None:
        quiet_transformers()
        self._options = options
        self._lab = ReuseLab(load(options.model, dtype=options.dtype), 2048)
        self._samples = PromptSampler(self._lab, options.facts, options.filler)

    def __call__(self, job: Job) -> Measured:
        name, number = job
        rng = random.Random(f"{self._options.seed} {name} {number}")
        prompt = self._samples.text(rng) if name == "text" else self._samples.task(name, rng)
        found = arm_outcomes(self._lab, prompt, arms_of(number, self._options), rng)
        _, full = next(found)
        return {arm: PromptRecord.of(prompt.gold, full, outcome) for arm, outcome in found}


_measurer: Measurer  # of a child process


def _begin(options: argparse.Namespace) -> None:
    global _measurer
    torch.set_num_threads(1)
    _measurer = Measurer(options)


def _measure(job: Job) -> tuple[Job, Measured]:
    return job, _measurer(job)


def measured(options: argparse.Namespace, jobs: list[Job]) -> Iterator[tuple[Job, Measured]]:
    """Measure jobs, possibly in processes; yield the results in any order."""
    if options.processes <= 1:
        measurer = Measurer(options)
        yield from ((job, measurer(job)) for job in jobs)
        return
    spawned = multiprocessing.get_context("spawn")  # never fork after gRPC and OpenMP have started
    with spawned.Pool(options.processes, _begin, (options,)) as pool:
        yield from pool.imap_unordered(_measure, jobs, chunksize=4)


def gates(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """Check that the benchmark could detect a loss of quality, and that the model has learned the tasks."""
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
        out[f"flips_gap_max_{name}"] = max(r["flips_gap_max"] for r in mine if r["task"] != "text")
        out[f"perplexity_change_{name}"] = found[name, "text"]["perplexity_change"]
    out["flips_noise_floor"] = sum(r["flips"] for r in rows if r["arm"] == "full_pieces" and r["task"] != "text")
    out["cacheblend_r1_kl"] = max(r["kl_mean"] for r in rows if r["arm"] == "cacheblend_r1")
    return out


def run(options: argparse.Namespace) -> dict[str, Any]:
    names = [*tasks.TASKS, "text"]
    kept = CheckpointedResults(options.out.with_suffix(".partial.jsonl") if options.out else None, options)
    found = list(_complete(kept, options))
    kept.write([(job, _plain(arms)) for job, arms in found])
    done = {job for job, _ in found}
    jobs = [job for i in range(max(options.n, options.n_exact)) for name in names if (job := (name, i)) not in done]
    with report.progress() as progress:
        bar = progress.add_task("measuring", total=len(jobs) + len(done), completed=len(done))
        for job, arms in measured(options, jobs):
            kept.add(job, _plain(arms))
            found.append((job, arms))
            progress.advance(bar)
    tallies: dict[tuple[str, str], ArmStatistics] = {}
    for (name, _), arms in sorted(found, key=lambda one: (names.index(one[0][0]), one[0][1])):
        for arm, record in arms.items():
            tallies.setdefault((name, arm), ArmStatistics()).records.append(record)
    rows = [tally.row(arm, name) for (name, arm), tally in tallies.items()]
    shown = ("arm", "task", "accuracy", "accuracy_full", "flips", "kl_mean", "top1_agreement", "recomputed_ratio")
    result = report.write(options, "quality", rows, summary(rows), shown)
    kept.forget()
    return result


def _complete(kept: CheckpointedResults, options: argparse.Namespace) -> Iterator[tuple[Job, Measured]]:
    """Yield the stored results of the prompts for which all arms were measured."""
    for (name, number), arms in kept.read():
        if {a.name for a in arms_of(number, options)} == arms.keys() - {"full_pieces"}:
            yield (name, number), {arm: PromptRecord(**record) for arm, record in arms.items()}


def _plain(arms: Measured) -> dict[str, dict[str, Any]]:
    return {arm: asdict(record) for arm, record in arms.items()}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("quality", (__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--model",
        default="demo",
        help="demo: its trained tasks; any other trained model, such as smollm2: real text",
    )
    parser.add_argument("--dtype", default="float32", help="float32 isolates the effect of reuse from rounding")
    parser.add_argument(
        "--n", type=report.at_least(1), help="prompts per task for the shuffled arms; 1000, or 100 of real text"
    )
    parser.add_argument(
        "--n-exact", type=report.at_least(1), help="prompts per task for the exact arms; likewise, or 30"
    )
    parser.add_argument(
        "--facts", type=report.at_least(1), default=4, help="maximum facts per prompt; two documents each"
    )
    parser.add_argument("--filler", type=int, default=12, help="maximum filler words per document")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=report.at_least(1), default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--threads",
        type=report.at_least(1),
        default=torch.get_num_threads(),
        help="threads of the single process for real text",
    )
    options = parser.parse_args(arguments)
    real = options.model != "demo"
    usual_sizes = (100, 30) if real else (1000, 1000)
    quick = (3, 1) if real else (20, 20)
    given = (options.n, options.n_exact)
    asked = [usual if number is None else number for number, usual in zip(given, usual_sizes, strict=True)]
    options.n, options.n_exact = (
        min(wanted, small) if options.quick else wanted for wanted, small in zip(asked, quick, strict=True)
    )
    return real_quality.run(options) if real else run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
