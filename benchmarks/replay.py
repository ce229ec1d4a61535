"""Replay of multi-turn conversations: without the cache, with it, and after kills of worker or daemon.

Each mode has its own node (except ``nocache``, which shares one), so no mode warms the cache of another. The modes take
turns. In ``worker_restarted`` and ``daemon_restarted``, the process gets SIGKILL before every turn but the first.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from kvsidecar import Client

from benchmarks import report, workload
from benchmarks.node import Node

MODES = ("nocache", "warm", "worker_restarted", "daemon_restarted")


@dataclass
class History:
    """A conversation in one mode: all token ids so far, and the answers."""

    tokens: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Turn:
    """One measured turn."""

    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    ideal_tokens: int


def ask(client: Client, mode: str, history: History, user: list[int], recorded: list[int] | None, length: int) -> Turn:
    """Send one turn; extend the history by the answer or, if there is one, by the recorded answer."""
    known = len(history.tokens)
    prompt = history.tokens + user
    result = client.generate(
        prompt, max_tokens=length, temperature=0.0, ignore_eos=True, skip_cache=mode == "nocache", deadline=600
    )
    history.answers.append(result.token_ids)
    history.tokens = prompt + (result.token_ids if recorded is None else recorded)
    # The engine never computed the keys of an answer's last token, so this token cannot be reused.
    ideal = min(max(0, known - 1 if recorded is None else known), len(prompt) - 1)
    return Turn(result.ttft_ms, result.prompt_tokens, result.cached_tokens, ideal)


def run(options: argparse.Namespace) -> dict[str, Any]:
    conversations = workload.read(options.workload, options.conversations, options.turns)
    modes = options.modes.split(",")
    unknown = set(modes) - set(MODES)
    if unknown:
        raise SystemExit(f"--modes has {', '.join(sorted(unknown))}; known are {', '.join(MODES)}")
    histories = {m: [History() for _ in conversations] for m in modes}
    measured: dict[tuple[str, int], list[Turn]] = {}
    with ExitStack() as stack, report.progress() as progress:
        # nocache and warm share a node, because nocache neither reads nor writes the cache.
        nodes: dict[str, Node] = {}
        for mode in modes:
            partner = nodes.get("warm" if mode == "nocache" else "nocache") if mode in MODES[:2] else None
            nodes[mode] = partner or stack.enter_context(
                Node(options.model, storage_bits=options.storage_bits, workers=options.workers, pool_bytes="768MiB")
            )
        task = progress.add_task("replaying", total=options.turns * len(modes) * len(conversations))
        for turn in range(options.turns):
            for mode in modes:
                node = nodes[mode]
                if turn and mode == "worker_restarted":
                    node.restart_worker(turn % options.workers)
                if turn and mode == "daemon_restarted":
                    node.restart_daemon()
                for i, conversation in enumerate(conversations):
                    client = node.client(turn % options.workers)
                    user, said = conversation.turns[turn]
                    ids = workload.turn_tokens(client.tokenize, user, turn == 0)
                    recorded = client.tokenize(said) if options.history == "recorded" else None
                    result = ask(client, mode, histories[mode][i], ids, recorded, options.answer_tokens)
                    measured.setdefault((mode, turn), []).append(result)
                    progress.advance(task)
                node.settle()
    rows = [
        {
            "mode": mode,
            "turn": turn + 1,
            "context_tokens": round(report.median([t.prompt_tokens for t in turns])),
            **report.figure([t.ttft_ms for t in turns], "ttft_ms_p50"),
            "reused_ratio": round(sum(t.cached_tokens for t in turns) / sum(t.prompt_tokens for t in turns), 4),
            "ideal_reused_ratio": round(sum(t.ideal_tokens for t in turns) / sum(t.prompt_tokens for t in turns), 4),
        }
        for (mode, turn), turns in sorted(measured.items(), key=lambda m: (MODES.index(m[0][0]), m[0][1]))
    ]
    return report.write(options, "replay", rows, _summary(options, modes, measured, histories))


def _summary(
    options: argparse.Namespace,
    modes: list[str],
    measured: dict[tuple[str, int], list[Turn]],
    histories: dict[str, list[History]],
) -> dict[str, Any]:
    last = options.turns - 1

    def ttft(mode: str, turn: int = last) -> float:
        return report.median([t.ttft_ms for t in measured[mode, turn]])

    def ratio(a: float, b: float) -> float:
        return round(a / b, 3)

    out: dict[str, Any] = {}
    if {"nocache", "warm"} <= set(modes):
        out["speedup_last_turn"] = ratio(ttft("nocache"), ttft("warm"))
    if "warm" in modes:
        out["flatness"] = ratio(ttft("warm"), ttft("warm", 0))
        warm = [t for (mode, turn), turns in measured.items() if mode == "warm" and turn for t in turns]
        out["reuse_of_ideal"] = ratio(sum(t.cached_tokens for t in warm), max(1, sum(t.ideal_tokens for t in warm)))
    for mode in ("worker_restarted", "daemon_restarted"):
        if {"warm", mode} <= set(modes):
            # Compare the modes turn by turn, without the first turn, which has nothing to reuse.
            pairs = [ttft(mode, t) / ttft("warm", t) for t in range(1, options.turns)]
            out[f"{mode}_over_warm"] = round(report.median(pairs), 3) if pairs else 1.0
            out[f"{mode}_over_warm_last_turn"] = ratio(ttft(mode), ttft("warm"))
    answers = [[h.answers for h in histories[m]] for m in modes]
    out["outputs_identical"] = all(a == answers[0] for a in answers)
    return out


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("replay", __doc__ or "")
    parser.add_argument("--model", default="demo", help="demo, shape:NAME or a folder")
    parser.add_argument("--workload", default="synthetic:1", help="synthetic:SEED or a JSONL file")
    parser.add_argument("--history", choices=["generated", "recorded"], default="generated")
    parser.add_argument("--conversations", type=report.at_least(1), default=3)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--workers", type=report.at_least(1), default=1)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--answer-tokens", type=report.at_least(1), default=96)
    parser.add_argument("--storage-bits", type=int, choices=[16, 8, 4], default=16)
    options = parser.parse_args(arguments)
    if options.quick:
        options.conversations, options.turns = min(2, options.conversations), min(4, options.turns)
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
