"""Decode speed with and without speculation, by kind of text: edits, agents' traces, chat, random text.

plain   no speculation
suffix  proposes the tokens that followed the same suffix before
trees   proposes several branches of such tokens
draft   uses ``--draft-model``
self    uses a copy of the model with 4-bit weights as draft model

``tokens_per_s`` counts all tokens of a batch from its first token to the end of its last answer, so it includes steps
in which only the longest answer is left. ``expected_tokens_per_s`` is computed from acceptance and measured costs: the
same tokens, divided by the time of the steps (by their rows) and of the proposals. All arms answer the same prompts, in
an order that rotates with every repeat. Each batch of an arm has its own tenant, so no arm finds the answers of another
arm. Answers end where the model ends them, because text after that would be of another kind. Every answer is compared
with the answer of the plain arm, greedy or with the same seed.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from inference_svc import Engine
from inference_svc.server.python_api import Result

WORKLOADS = ("edits", "agents", "chat", "unique")
_DATA = Path(__file__).parent / "data"
_ARMS: dict[str, dict[str, Any]] = {
    "plain": {"speculation": "off"},
    "suffix": {"speculation": "ngram", "speculation_branches": 1},
    "trees": {"speculation": "ngram"},
    "draft": {"speculation": "draft"},
    "self": {"speculation": "draft"},
}
_FEWEST = 4  # minimum number of prompts per repeat
_NAMES = ("Ada", "Bruno", "Chen", "Dina", "Emil", "Farah", "Goran", "Hana", "Ines", "Jonas")


@dataclass(frozen=True)
class SampledPrompt:
    """A prompt with its sampling parameters."""

    prompt: Any
    options: dict[str, Any]


def edits(rng: random.Random) -> SampledPrompt:
    """Build a prompt that asks to rewrite a file with one change."""
    known = [json.loads(line)["source"] for line in (_DATA / "functions.jsonl").read_text("utf-8").splitlines()]
    file = "\n\n\n".join(rng.sample(known, 3))
    name = rng.choice(known[:8]).split("(")[0].removeprefix("def ")
    text = f"Write this file again and rename {name} to my_{name}. Answer with code alone.\n\n```python\n{file}\n```"
    return SampledPrompt([{"role": "user", "content": text}], {"temperature": 0})


def agents(rng: random.Random) -> SampledPrompt:
    """Build a prompt that asks to repeat a tool result with one change. Two such turns precede this one."""
    messages = [{"role": "system", "content": "You pass orders on. Answer with the order's JSON, changing its status."}]
    for turn in range(3):
        order = {
            "order_id": rng.randrange(10**6),
            "customer": {"name": rng.choice(_NAMES), "tier": rng.choice(["basic", "gold"])},
            "items": [{"sku": f"SKU-{rng.randrange(10**4)}", "quantity": rng.randrange(1, 9)} for _ in range(3)],
            "status": "received",
        }
        messages.append({"role": "user", "content": f"Tool result:\n{json.dumps(order, indent=1)}\nMark it as packed."})
        if turn < 2:
            packed = json.dumps(order | {"status": "packed"}, indent=1)
            messages.append({"role": "assistant", "content": packed})
    return SampledPrompt(messages, {"temperature": 0})


def chat(rng: random.Random) -> SampledPrompt:
    """Build a prompt of a user's message to an agent."""
    lines = [json.loads(line) for line in (_DATA / "real_text.jsonl").read_text("utf-8").splitlines()]
    talks = [line["parts"] for line in lines if line["kind"] == "dialogues"]
    said = [text for who, text in rng.choice(talks) if who == "user"]
    return SampledPrompt([{"role": "user", "content": rng.choice(said)}], {"temperature": 0})


def unique(rng: random.Random) -> SampledPrompt:
    """Build a prompt of random words; a repetition penalty keeps the answer from repeating itself, too."""
    words = " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(80))
    options = {"temperature": 1.0, "seed": rng.randrange(2**32), "repetition_penalty": 1.5, "ignore_eos": True}
    return SampledPrompt(words, options)


_KINDS = {"edits": edits, "agents": agents, "chat": chat, "unique": unique}


@dataclass
class ArmTotals:
    """Accumulated results of one arm for one kind of text and one batch size."""

    rates: list[float] = field(default_factory=list)
    generated: int = 0
    drafted: int = 0
    accepted: int = 0
    branched: int = 0
    expected_seconds: float = 0.0
    identical: bool = True

    @property
    def passes(self) -> int:
        """Number of steps, counted per sequence: one for each token that was not an accepted draft token."""
        return max(1, self.generated - self.accepted)

    def add(self, repeat: list[BatchResult]) -> None:
        """Add the results of one repeat."""
        results = [r for measured in repeat for r in measured.answers]
        tokens = sum(len(r.token_ids) - 1 for r in results)
        self.rates.append(tokens / sum(measured.seconds for measured in repeat))
        self.generated += tokens
        self.drafted += sum(r.draft_tokens for r in results)
        self.accepted += sum(r.accepted_tokens for r in results)
        self.branched += sum(measured.branched for measured in repeat)
        self.expected_seconds += sum(measured.expected_seconds for measured in repeat)


@dataclass(frozen=True)
class BatchResult:
    """Answers of a batch, and the expected seconds of its steps and proposals.

    ``branched`` is the number of accepted tokens in branches other than the first.
    """

    answers: list[Result]
    expected_seconds: float
    branched: int

    @property
    def seconds(self) -> float:
        """Time from the first token of the batch to the end of its last answer."""
        return (max(r.total_ms for r in self.answers) - min(r.ttft_ms for r in self.answers)) / 1e3


def measure(engine: Engine, asks: list[SampledPrompt], arm: str, length: int) -> BatchResult:
    """Let one arm answer a batch of prompts."""
    options: dict[str, Any] = {"max_tokens": length, **_ARMS[arm]}
    options["tenant_salt"] = secrets.token_bytes(8)
    engine.generate_many([(ask.prompt, options | {"max_tokens": 1}) for ask in asks])  # prefill first
    speculator = engine._runtime.engine.speculator
    before = replace(speculator.stats, rows=speculator.stats.rows.copy())
    found = engine.generate_many([(ask.prompt, ask.options | options) for ask in asks])
    after, costs = speculator.stats, speculator.costs
    passes = sum(count * costs.seconds(rows, arm != "plain") for rows, count in (after.rows - before.rows).items())
    drafting = after.draft_seconds - before.draft_seconds
    return BatchResult(found, passes + drafting, after.branched_tokens - before.branched_tokens)


def run(options: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        engines = {arm: engine for engine, arms in _engines(options, stack) for arm in arms}
        sums = {(w, b, arm): ArmTotals() for w in options.workloads for b in options.batches for arm in engines}
        progress = stack.enter_context(report.progress())
        task = progress.add_task("measuring", total=options.repeats * len(sums))
        for repeat in range(options.repeats):
            for workload in options.workloads:
                rng = random.Random(f"{workload} {repeat}")
                for batch in options.batches:
                    batches = [[_KINDS[workload](rng) for _ in range(batch)] for _ in range(-(-_FEWEST // batch))]
                    answers: dict[str, list[list[int]]] = {}
                    arms, first = list(engines.items()), repeat % len(engines)  # the order rotates
                    for arm, engine in arms[first:] + arms[:first]:
                        measured = [measure(engine, asks, arm, options.answer_tokens) for asks in batches]
                        answers[arm] = [r.token_ids for one in measured for r in one.answers]
                        sums[workload, batch, arm].add(measured)
                        progress.advance(task)
                    for arm in engines:
                        sums[workload, batch, arm].identical &= answers[arm] == answers["plain"]
        rows = [_row(arm, workload, batch, into) for (workload, batch, arm), into in sums.items()]
    return report.write(options, "speculate", rows, _summary(rows))


def _engines(options: argparse.Namespace, stack: ExitStack) -> list[tuple[Engine, list[str]]]:
    """Return the engines, each with the names of its arms; the first engine has ``plain``."""

    def start(draft_model: str) -> Engine:
        made = Engine.from_pretrained(
            options.model, cache=None, pool_bytes="512MiB", speculate="auto", draft_model=draft_model,
            dtype=options.dtype, num_speculative_branches=options.branches,
        )  # fmt: skip
        return stack.enter_context(made)

    arms = ["plain", "suffix", "trees", *(["draft"] if options.draft_model else [])]
    out = [(start(options.draft_model), arms)]
    if options.self:
        out.append((start("self"), ["self"]))
    return out


def _row(arm: str, workload: str, batch: int, sums: ArmTotals) -> dict[str, Any]:
    return {
        "arm": arm,
        "workload": workload,
        "batch": batch,
        **report.figure(sums.rates, "tokens_per_s"),
        "answer_tokens": sums.generated,
        "accepted_per_pass": round(sums.generated / sums.passes, 3),
        "accepted_in_branches": round(sums.branched / max(1, sums.accepted), 3),
        "acceptance": round(sums.accepted / max(1, sums.drafted), 3),
        "expected_tokens_per_s": round(sums.generated / sums.expected_seconds, 2),
        "identical": sums.identical,
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    plain = {(r["workload"], r["batch"]): r["tokens_per_s"] for r in rows if r["arm"] == "plain"}
    out: dict[str, Any] = {"identical": all(r["identical"] for r in rows)}
    for r in rows:
        if r["arm"] != "plain":
            name = f"{r['arm']}_{r['workload']}_{r['batch']}"
            out[f"{name}_over_plain"] = round(r["tokens_per_s"] / plain[r["workload"], r["batch"]], 3)
            out[f"{name}_of_expected"] = round(r["tokens_per_s"] / r["expected_tokens_per_s"], 3)
    return out


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("speculate", __doc__ or "")
    parser.add_argument("--model", default="smollm2", help="smollm2, demo, shape:NAME or a folder")
    parser.add_argument("--draft-model", default="", help="smaller model with the same tokenizer, for the arm draft")
    parser.add_argument("--self", action="store_true", help="also run the arm self")
    parser.add_argument(
        "--branches",
        type=report.at_least(1),
        default=2,
        help="maximum branches of a draft tree, for all arms except suffix",
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--batches", type=report.at_least(1), nargs="+", default=[1, 4])
    parser.add_argument("--answer-tokens", type=report.at_least(1), default=160)
    parser.add_argument("--repeats", type=report.at_least(1), default=7)
    options = parser.parse_args(arguments)
    if options.quick:
        options.repeats, options.answer_tokens, options.batches = 2, min(64, options.answer_tokens), [1]
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
