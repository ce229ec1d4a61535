"""Tool-using agents: growing, branching and compacted histories, and engine restarts.

All clients share the beginning of the prompt (system prompt and tools); each has its own history after it. The engine
generates the answers, which become part of the history. The column ``step`` has the kind of a step:

first      the first request of every client, which cannot hit; ``all`` excludes it
grow       continue from the last answer
branch     go back to an earlier answer and continue with another message
compact    ask for a summary; then continue from the beginning, the summary and the last turns (``compacted``)
restarted  continue after SIGKILL to the engine

nocache       our worker, with the cache disabled
prefix        our worker without a daemon: its own prefix cache only
ours          our worker on its daemon
vllm_nocache  vLLM without its prefix cache
vllm_prefix   vLLM with its prefix cache
vllm_ours     vLLM with our connector

``ideal_reused_ratio`` is the share of the prompt in its longest common prefix with any earlier prompt and answer of the
arm, in whole blocks for vLLM's arms. Arms alternate after every step of all clients.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import report, workload
from benchmarks.systems.arms import EngineArm, arms_of
from benchmarks.systems.checkpoint import dtype_of, folder_of
from benchmarks.systems.common_prefix import common_prefix
from benchmarks.systems.engine import Answer

ARMS = ("nocache", "prefix", "ours", "vllm_nocache", "vllm_prefix", "vllm_ours")
KINDS = ("first", "grow", "branch", "compact", "compacted", "restarted")
_SUMMARY_WORDS = 12
_COMPARED = {"ours": ("nocache", "prefix", "vllm_prefix"), "vllm_ours": ("vllm_nocache", "vllm_prefix")}


@dataclass
class Agent:
    """History of one client in one arm: the shared beginning, then turns. A turn is a question with its answer."""

    beginning: list[int]
    turns: list[list[int]] = field(default_factory=list)

    @property
    def history(self) -> list[int]:
        return self.beginning + [token for turn in self.turns for token in turn]

    def branch(self, back: int) -> None:
        """Forget the last ``back`` turns."""
        del self.turns[max(0, len(self.turns) - back) :]

    def compact(self, summary: list[int], kept: int) -> None:
        self.turns = [summary, *self.turns[max(0, len(self.turns) - kept) :]]


class ReadHistory:
    """Sequences that an arm has computed, to find how much of a prompt it could reuse at best."""

    def __init__(self, block: int) -> None:
        self._block, self._sequences = block, list[list[int]]()

    def add(self, prompt: list[int], answer: list[int]) -> None:
        """Record a prompt and its answer.

        The last token of the answer is left out, because the engine never computed its keys and values.
        """
        self._sequences.append(prompt + answer[:-1])

    def ideal(self, prompt: list[int]) -> int:
        longest = max((common_prefix(one, prompt) for one in self._sequences), default=0)
        return min(longest, len(prompt) - 1) // self._block * self._block


@dataclass(frozen=True)
class MeasuredRequest:
    """One measured request."""

    prompt_tokens: int
    answer: Answer
    ideal: int


@dataclass
class ClientStep:
    """One step: a concurrent request from each client."""

    kind: str
    asked: list[MeasuredRequest]
    seconds: float


class ArmRun:
    """One arm with its agents and measured steps."""

    def __init__(self, arm: EngineArm, beginning: list[int], clients: int) -> None:
        self.arm, self.agents = arm, [Agent(beginning) for _ in range(clients)]
        self._read, self.steps = ReadHistory(arm.block), list[ClientStep]()

    def step(self, kind: str, said: list[list[int]], options: argparse.Namespace) -> None:
        """Send one request per agent, concurrently. ``said`` has a new message or tool result for each agent."""
        if kind == "restarted" and self.steps[-1].kind != "restarted":
            self.arm.restart()
        for agent in self.agents:
            if kind == "branch":
                agent.branch(options.branch_back)
        prompts = [agent.history + new for agent, new in zip(self.agents, said, strict=True)]
        ideals = [self._read.ideal(prompt) for prompt in prompts]
        began = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: self.arm.ask(prompt, options.answer_tokens), prompts))
        seconds = time.perf_counter() - began
        self.arm.settle()
        found = []
        for agent, new, prompt, answer, ideal in zip(self.agents, said, prompts, answers, ideals, strict=True):
            self._read.add(prompt, answer.ids)
            found.append(MeasuredRequest(len(prompt), answer, ideal))
            if kind == "compact":
                agent.compact(answer.ids, options.kept_turns)
            else:
                agent.turns.append(new + answer.ids)
        self.steps.append(ClientStep(kind, found, seconds))

    def rows(self) -> list[dict[str, Any]]:
        kinds = {kind: [s for s in self.steps if s.kind == kind] for kind in KINDS}
        kinds["all"] = [s for s in self.steps if s.kind != "first"]
        return [self._row(kind, steps) for kind, steps in kinds.items() if steps]

    def _row(self, kind: str, steps: list[ClientStep]) -> dict[str, Any]:
        asked = [one for step in steps for one in step.asked]
        tokens = sum(one.prompt_tokens for one in asked)
        times = [one.answer.ttft_ms for one in asked]
        return {
            "arm": self.arm.name,
            "step": kind,
            "requests": len(asked),
            "context_tokens": tokens // len(asked),
            **report.figure(times, "ttft_ms_p50"),
            "reused_ratio": round(sum(one.answer.cached for one in asked) / tokens, 4),
            "ideal_reused_ratio": round(sum(one.ideal for one in asked) / tokens, 4),
            "tokens_per_s": round(sum(len(one.answer.ids) for one in asked) / sum(s.seconds for s in steps), 2),
        }


def plan(options: argparse.Namespace) -> list[str]:
    """Return the kinds of steps, in order."""
    grow, branch, after = options.turns, options.branches, options.turns_after
    return ["first", *["grow"] * grow, *["branch"] * branch, "compact", *["compacted"] * after, *["restarted"] * after]


def run(options: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    steps = plan(options)
    with ExitStack() as stack, report.progress() as progress:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsidecar-agents-")))
        model = folder_of(options.model, scratch)
        tokenizer: Any = AutoTokenizer.from_pretrained(model)

        def tokens(text: str) -> list[int]:
            ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids

        task = progress.add_task("starting", total=len(steps) * len(options.arms))
        beginning = tokens(workload.words(f"{options.seed}:tools", options.tools_words))
        asking = tokens(workload.words(f"{options.seed}:summary", _SUMMARY_WORDS))
        talks = workload.read(options.workload, options.clients, len(steps))
        said = [[workload.turn_tokens(tokens, user, False) for user, _ in talk.turns] for talk in talks]
        longest = len(beginning) + max(sum(map(len, one)) for one in said) + len(steps) * options.answer_tokens
        arms, missing = arms_of(options, stack, scratch, model, dtype_of(options.model, options.dtype), longest)
        for why in missing:
            report.console.print(f"[yellow]{why}[/yellow]")
        sides = [ArmRun(arm, beginning, options.clients) for arm in arms]
        progress.update(task, total=len(steps) * len(sides))
        for i, kind in enumerate(steps):
            progress.update(task, description=kind)
            told = [asking if kind == "compact" else one[i] for one in said]
            for side in sides:
                side.step(kind, told, options)
                progress.advance(task)
    rows = [row for side in sides for row in side.rows()]
    return report.write(options, "agents", rows, _summary(rows) | ({"missing": missing} if missing else {}))


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    by = {(r["arm"], r["step"]): r for r in rows}
    out: dict[str, Any] = {}
    for mine, others in _COMPARED.items():
        if (mine, "all") not in by:
            continue
        parts = [by[mine, kind] for kind in ("grow", "branch") if (mine, kind) in by]
        reused, ideal = (
            sum(r[name] * r["requests"] * r["context_tokens"] for r in parts)
            for name in ("reused_ratio", "ideal_reused_ratio")
        )
        out[f"{mine}_reuse_of_ideal"] = round(reused / ideal, 4) if ideal else 1.0
        for other in others:
            for kind in ("all", "compacted", "restarted"):
                if (other, kind) in by and (mine, kind) in by:
                    ratio = by[other, kind]["ttft_ms_p50"] / by[mine, kind]["ttft_ms_p50"]
                    out[f"{mine}_ttft_better_than_{other}_{kind}"] = round(ratio, 2)
    return out


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("agents", (__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto", help="dtype of vLLM and of ours")
    parser.add_argument("--workload", default="synthetic:1", help="synthetic:SEED or a JSONL file")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: all; with --quick without vllm_nocache")
    parser.add_argument("--clients", type=report.at_least(1), default=8)
    parser.add_argument("--turns", type=report.at_least(0), default=4, help="turns in which histories grow")
    parser.add_argument("--branches", type=report.at_least(0), default=2)
    parser.add_argument("--branch-back", type=report.at_least(0), default=2, help="turns that a branch drops")
    parser.add_argument("--kept-turns", type=report.at_least(0), default=2, help="last turns kept by compaction")
    parser.add_argument(
        "--turns-after", type=report.at_least(0), default=2, help="turns after compaction, and after the restart"
    )
    parser.add_argument(
        "--tools-words", type=int, default=1000, help="words of the shared beginning, about a token each"
    )
    parser.add_argument("--answer-tokens", type=report.at_least(1), default=32)
    parser.add_argument("--storage-bits", type=int, choices=[16, 8, 4], default=16)
    parser.add_argument("--eager", action="store_true", help="run vLLM without its compiler")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.quick:
        options.clients, options.turns, options.branches, options.turns_after = min(options.clients, 3), 2, 1, 1
        options.tools_words, options.answer_tokens, options.eager = min(options.tools_words, 400), 12, True
    options.arms = options.arms or [arm for arm in ARMS if not options.quick or arm != "vllm_nocache"]
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
