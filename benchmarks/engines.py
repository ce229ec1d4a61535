"""vLLM with our connector compared with vLLM without it: TTFT after restarts, overhead, equality.

nocache                     vLLM computes a new document
own_cache                   vLLM's own prefix cache has the document of a new question
kvsidecar                   the same in the engine with our connector
kvsidecar_engine_restarted  the same after SIGKILL to the engine: all chunks come from the daemon
kvsidecar_daemon_restarted  the same after SIGKILL to the daemon, with vLLM's own cache emptied: all come from disk
example_connector           vLLM's example connector, which stores files, with vLLM's own cache emptied

Every question is new. Two engines answer it alternately, one with a connector and one without. ``identical`` is true if
their greedy answers are equal.

``answers`` compares more answers. It asks vLLM without a connector four times: alone, with all but the last token in
vLLM's own cache, in a batch, and in a batch of another order. vLLM is sure of an answer if all four are equal;
``answers_different_where_sure`` counts only such prompts. In bfloat16, a sure answer may still change, because a row's
result depends on its batch. So vLLM without a connector repeats the requests of the engine with the connector, and
``plain_different_where_sure`` counts its own different answers.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.node import Node
from benchmarks.systems.checkpoint import dtype_of, folder_of, lengths_of
from benchmarks.systems.engine import Answer, Engine, EngineDied, RequestFailed
from benchmarks.systems.environments import EngineNotInstalled
from benchmarks.systems.vllm_engines import EngineSettings, environment

PARTS = ("ttft", "overhead", "answers", "chat")
QUESTION_TOKENS, _ANSWER_TOKENS = 32, 8
_KV_BYTES = 2 << 30
_OVERHEAD_TOKENS, _OVERHEAD_ANSWER, _TOGETHER, _TURNS = 512, 16, 4, 4
_CHECKED_TOKENS, _CHAT_TURN_TOKENS, _CHAT_ANSWER_TOKENS = 256, 200, 60


class EnginePair:
    """vLLM without a connector, and vLLM with our connector on a daemon."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsidecar-engines-")))
        place, model = environment(), folder_of(options.model, scratch)
        options.context_tokens = lengths_of(model, options.context_tokens, _ANSWER_TOKENS)
        self.recipe = EngineSettings(
            place,
            scratch,
            model,
            dtype_of(options.model, options.dtype),
            max([*options.context_tokens, options.turns * (_CHAT_TURN_TOKENS + _CHAT_ANSWER_TOKENS)]) + _ANSWER_TOKENS,
            _KV_BYTES,
            eager=options.eager,
        )
        self.scratch = scratch
        self.node = stack.enter_context(Node(workers=0, arena_bytes=options.arena_bytes, store_bytes="8GiB"))
        self.plain = stack.enter_context(self.recipe.plain())
        self.ours = stack.enter_context(self.recipe.connected(self.node.cache_socket))

    @property
    def block(self) -> int:
        return int(self.ours.about["block_tokens"])

    def turns(self, prompt: list[int], turn: int, answer: int = _ANSWER_TOKENS) -> tuple[Answer, Answer]:
        """Ask both engines, in alternating order; return plain's answer and ours after ours is stored."""
        order = (self.plain, self.ours) if turn % 2 else (self.ours, self.plain)
        found = {}
        for engine in order:
            found[engine] = engine.ask(prompt, answer)
            if engine is self.ours:
                self.node.settle_stores()
        return found[self.plain], found[self.ours]

    def restart(self) -> None:
        """Kill the engine with the connector, start it again, and warm it up."""
        self.ours.restart()
        self.ours.ask([7] * QUESTION_TOKENS, 2)


class TokenSource:
    """Source of random token ids that no engine has seen."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def __call__(self, tokens: int) -> list[int]:
        return [self._rng.randrange(16, 4000) for _ in range(tokens)]


class ArmTimes:
    """Answers by arm and length, each with the information whether both engines gave the same one."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], list[tuple[Answer, bool]]] = {}

    def add(self, arm: str, context: int, answer: Answer, same: bool) -> None:
        self._found.setdefault((arm, context), []).append((answer, same))

    def ttft(self, arm: str, context: int) -> list[float]:
        return [answer.ttft_ms for answer, _ in self._found.get((arm, context), [])]

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "engine": "vllm",
                "arm": arm,
                "context_tokens": context,
                **report.figure([a.ttft_ms for a, _ in found], "ttft_ms_p50"),
                "cached_tokens": found[-1][0].cached,
                "identical": all(same for _, same in found),
            }
            for (arm, context), found in self._found.items()
        ]


def ttft(
    pair: EnginePair, options: argparse.Namespace, draw: TokenSource, step: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure all arms over documents of every length."""
    times = ArmTimes()
    lengths = [(context, i) for context in options.context_tokens for i in range(options.repeats)]
    documents = {at: draw(at[0] - QUESTION_TOKENS) for at in lengths}

    def ask(arms: tuple[str, str]) -> None:
        for turn, (at, document) in enumerate(documents.items()):
            plain, ours = pair.turns(document + draw(QUESTION_TOKENS), turn)
            for arm, answer in zip(arms, (plain, ours), strict=True):
                times.add(arm, at[0], answer, plain.ids == ours.ids)
            step()

    ask(("nocache", "kvsidecar_cold"))
    ask(("own_cache", "kvsidecar"))
    pair.restart()
    ask(("own_cache", "kvsidecar_engine_restarted"))
    pair.node.kill("daemon")
    pair.node.start_daemon()
    pair.node.wait_sessions(2)
    pair.ours.do("reset")
    ask(("own_cache", "kvsidecar_daemon_restarted"))
    summary: dict[str, Any] = {}
    if options.example:
        try:
            summary |= example(pair, documents, draw, times, step)
        except (EngineDied, RequestFailed) as why:  # keep the other results
            summary["missing"] = {"example_connector": _last_line(why)}
    for context in options.context_tokens:
        restarted = report.median(times.ttft("kvsidecar_engine_restarted", context))
        own, nothing = (report.median(times.ttft(arm, context)) for arm in ("own_cache", "nocache"))
        cold = zip(times.ttft("kvsidecar_cold", context), times.ttft("nocache", context), strict=True)
        summary[f"restarted_over_own_cache_{context}"] = round(restarted / own, 3)
        summary[f"speedup_after_restart_{context}"] = round(nothing / restarted, 2)
        summary[f"cold_ttft_ratio_{context}"] = report.median([ours / plain for ours, plain in cold])
    return times.rows(), summary


def example(
    pair: EnginePair, documents: dict[Any, list[int]], draw: TokenSource, times: ArmTimes, step: Any
) -> dict[str, Any]:
    """Measure vLLM's example connector, which writes files while the request waits.

    Its requests alternate with requests to vLLM's own cache, because the machine's speed drifts over hours.
    """
    ratios: dict[int, list[float]] = {}
    with pair.recipe.example(pair.scratch / "files") as engine:
        for document in documents.values():
            engine.ask(document + draw(QUESTION_TOKENS))
        engine.do("reset")
        for (context, _), document in documents.items():
            prompt = document + draw(QUESTION_TOKENS)
            found, own = (asked.ask(prompt, _ANSWER_TOKENS) for asked in (engine, pair.plain))
            times.add("example_connector", context, found, found.ids == own.ids)
            ratios.setdefault(context, []).append(found.ttft_ms / own.ttft_ms)
            step()
    return {f"example_over_own_cache_{context}": report.median(found) for context, found in ratios.items()}


def _last_line(why: Exception) -> str:
    lines = [line for line in str(why).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(why).__name__


def overhead(pair: EnginePair, options: argparse.Namespace, draw: TokenSource, step: Any) -> dict[str, Any]:
    """Measure the connector's overhead with prompts that occur only once.

    For TTFT, one request runs at a time. For tokens per second, several run concurrently in a closed loop, and the
    clock stops when all chunks are stored.
    """
    ratios, rates = [], []
    for turn in range(options.pairs):
        order = (pair.plain, pair.ours) if turn % 2 else (pair.ours, pair.plain)
        first: dict[Engine, float] = {}
        for engine in order:
            first[engine] = engine.ask(draw(_OVERHEAD_TOKENS)).ttft_ms
            pair.node.settle_stores()
        ratios.append(first[pair.ours] / first[pair.plain])
        step()
    for turn in range(options.rounds):
        order = (pair.plain, pair.ours) if turn % 2 else (pair.ours, pair.plain)
        rate: dict[Engine, float] = {}
        for engine in order:
            prompts = [draw(_OVERHEAD_TOKENS) for _ in range(_TOGETHER * _TURNS)]
            began = time.perf_counter()
            for at in range(0, len(prompts), _TOGETHER):
                together(engine, prompts[at : at + _TOGETHER], _OVERHEAD_ANSWER)
            answered = time.perf_counter()
            stored = pair.node.settle_stores()
            elapsed = (max(answered, stored) if engine is pair.ours else answered) - began
            rate[engine] = len(prompts) * (_OVERHEAD_TOKENS + _OVERHEAD_ANSWER) / elapsed
        rates.append(rate[pair.ours] / rate[pair.plain])
        step()
    return {
        **report.figure(ratios, "overhead_ttft_ratio", "overhead_ttft"),
        **report.figure(rates, "overhead_throughput_ratio", "overhead_throughput"),
    }


def together(engine: Engine, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Ask all prompts concurrently; return the answers."""
    size = len(prompts)
    with ThreadPoolExecutor(size) as pool:
        return [found.ids for found in pool.map(lambda prompt: engine.ask(prompt, tokens, together=size), prompts)]


def answers(pair: EnginePair, options: argparse.Namespace, draw: TokenSource, step: Any) -> dict[str, Any]:
    """Compare our answers with plain's, without cached tokens and after a restart."""
    # A prompt has whole blocks and one token more, so that the engine computes only this token of a cached prompt.
    shared = draw(_CHECKED_TOKENS // 2)
    prompts = [shared + draw(_CHECKED_TOKENS // 2 + 1) for _ in range(options.answers)]
    size = pair.recipe.sequences

    def one_by_one(engine: Engine) -> list[list[int]]:
        return [engine.ask(prompt, _ANSWER_TOKENS).ids for prompt in prompts]

    def all_of(engine: Engine, asked: list[list[int]]) -> list[list[int]]:
        return [
            ids for at in range(0, len(asked), size) for ids in together(engine, asked[at : at + size], _ANSWER_TOKENS)
        ]

    alone, known = one_by_one(pair.plain), one_by_one(pair.plain)
    step()
    pair.plain.do("reset")
    batched = all_of(pair.plain, prompts)
    turned = all_of(pair.plain, prompts[::-1])[::-1]
    pair.plain.do("reset")
    once_more = all_of(pair.plain, prompts), one_by_one(pair.plain)
    step()
    cold = all_of(pair.ours, prompts)
    pair.node.settle_stores()
    pair.restart()
    warm = [pair.ours.ask(prompt, _ANSWER_TOKENS) for prompt in prompts]
    step()
    sure = [a == b == c == d for a, b, c, d in zip(alone, known, batched, turned, strict=True)]

    def different(cold: list[list[int]], warm: list[list[int]]) -> list[bool]:
        return [not (a == b == c) for a, b, c in zip(alone, cold, warm, strict=True)]

    ours, plain = different(cold, [answer.ids for answer in warm]), different(*once_more)
    return {
        "answers": len(prompts),
        "answers_plain_is_sure_of": sum(sure),
        "answers_different_where_sure": sum(d for d, s in zip(ours, sure, strict=True) if s),
        "plain_different_where_sure": sum(d for d, s in zip(plain, sure, strict=True) if s),
        "answers_different": sum(ours),
        "plain_different": sum(plain),
        "answers_reused_ratio": round(sum(w.cached for w in warm) / sum(map(len, prompts)), 4),
    }


def chat(
    pair: EnginePair, options: argparse.Namespace, draw: TokenSource, step: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Run a chat; before every second turn, kill the engine and continue in a new one."""
    history: list[int] = []
    rows, same = [], True
    for turn in range(options.turns):
        if turn and turn % 2 == 0:
            pair.restart()
        known, prompt = max(0, len(history) - 1), history + draw(_CHAT_TURN_TOKENS)
        plain, ours = pair.turns(prompt, turn, _CHAT_ANSWER_TOKENS)
        same = same and plain.ids == ours.ids
        # Only whole blocks can be reused. The engine computes at least one token, and it never computed the keys of an
        # answer's last token.
        ideal = min(known, len(prompt) - 1) // pair.block * pair.block
        rows.append(
            {
                "engine": "vllm",
                "arm": "chat",
                "context_tokens": len(prompt),
                "ttft_ms_p50": round(ours.ttft_ms, 2),
                "spread": 0.0,
                "cached_tokens": ours.cached,
                "identical": plain.ids == ours.ids,
                "ideal_cached_tokens": ideal,
            }
        )
        history = prompt + ours.ids
        step()
    reused, could = sum(r["cached_tokens"] for r in rows), sum(r["ideal_cached_tokens"] for r in rows)
    return rows, {"chat_reuse_of_ideal": round(reused / max(1, could), 4), "chat_identical": same}


def run(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    draw = TokenSource(options.seed)
    with ExitStack() as stack, report.progress() as progress:
        task = progress.add_task("starting vLLM", total=None)
        try:
            pair = EnginePair(options, stack)
        except EngineNotInstalled as why:
            report.console.print(f"[yellow]{why}[/yellow]")
            return report.write(options, "engines", [], {"missing": str(why)})
        progress.update(task, total=_steps(options))
        summary |= {"dtype": pair.recipe.dtype, **pair.ours.about}

        def step() -> None:
            progress.advance(task)

        for part in options.parts:
            progress.update(task, description=part)
            if part == "overhead":
                summary |= overhead(pair, options, draw, step)
            elif part == "answers":
                summary |= answers(pair, options, draw, step)
            else:
                found, told = (ttft if part == "ttft" else chat)(pair, options, draw, step)
                rows += found
                summary |= told
    return report.write(options, "engines", rows, summary)


def _steps(options: argparse.Namespace) -> int:
    rounds = 5 if options.example else 4
    of = {
        "ttft": options.repeats * len(options.context_tokens) * rounds,
        "overhead": options.pairs + options.rounds,
        "answers": 3,
        "chat": options.turns,
    }
    return sum(of[part] for part in options.parts)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("engines", (__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto", help="auto (bfloat16 where the CPU has it), float32 or bfloat16")
    parser.add_argument(
        "--context-tokens", type=report.at_least(1), nargs="+", help="default: 1024 and 4096 if they fit the context"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=report.at_least(1), default=5, help="documents of each length")
    parser.add_argument("--pairs", type=report.at_least(1), default=24, help="unique prompts for the overhead")
    parser.add_argument("--rounds", type=report.at_least(1), default=8, help="batches for the throughput")
    parser.add_argument("--answers", type=report.at_least(1), default=200, help="prompts whose answers are compared")
    parser.add_argument("--turns", type=int, default=8, help="turns of the chat")
    parser.add_argument("--arena-bytes", default="2GiB")
    parser.add_argument("--eager", action="store_true", help="run vLLM without its compiler")
    parser.add_argument("--no-example", dest="example", action="store_false", help="skip vLLM's example connector")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.quick:
        options.context_tokens = (options.context_tokens or [1024])[:1]
        options.repeats, options.pairs, options.rounds, options.answers, options.turns = 2, 3, 1, 16, 4
        options.eager, options.example = True, False
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
