"""The demo: a conversation that never starts over, whoever dies.

Two workers share one cache daemon. The first worker is killed in the middle of the conversation, later the daemon
is; the answers stay those of an engine without cache, and no text is read twice.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from benchmarks import report
from benchmarks.node import Node
from benchmarks.replay import History, Turn, ask
from benchmarks.workload import turn_tokens

CONVERSATION = Path(__file__).parent / "data" / "conversation.json"
KILL_WORKER_AFTER, KILL_DAEMON_AFTER = 4, 6
console = report.console


@dataclass
class Story:
    """One conversation, played with and without cache on a node."""

    plain: History = field(default_factory=History)
    warm: History = field(default_factory=History)
    plain_turns: list[Turn] = field(default_factory=list)
    warm_turns: list[Turn] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return self.plain.answers == self.warm.answers

    @property
    def speedup(self) -> float:
        return self.plain_turns[-1].ttft_ms / self.warm_turns[-1].ttft_ms

    @property
    def reuse_of_ideal(self) -> float:
        later = self.warm_turns[1:]
        return sum(t.cached_tokens for t in later) / max(1, sum(t.ideal_tokens for t in later))


def _table(title: str) -> Table:
    out = Table(title=title, title_justify="left")
    for name in ("turn", "context tokens", "TTFT without cache", "TTFT warm", "reused", "served by", "answers equal"):
        out.add_column(name, justify="right" if name not in ("served by", "answers equal") else "left")
    return out


def play(node: Node, turns: list[str], answer_tokens: int, title: str, kill: bool) -> Story:
    """Plays the conversation turn by turn; with ``kill``, both victims die on the way."""
    story, worker, table = Story(), 0, _table(title)
    with Live(table, console=console, refresh_per_second=8) if kill else _quiet():
        for i, text in enumerate(turns):
            if kill and i == KILL_WORKER_AFTER:
                node.kill("worker-0")
                worker = 1
                table.add_row("", "", "", "", "", "[red]worker-0 killed (SIGKILL)[/red]", "", end_section=True)
            if kill and i == KILL_DAEMON_AFTER:
                node.kill("daemon")
                node.start_daemon()
                node.wait_attached(worker)
                table.add_row("", "", "", "", "", "[red]cache daemon killed, started again[/red]", "", end_section=True)
            client = node.client(worker)
            user = turn_tokens(client.tokenize, text, i == 0)
            story.plain_turns.append(ask(client, "nocache", story.plain, user, None, answer_tokens))
            turn = ask(client, "warm", story.warm, user, None, answer_tokens)
            story.warm_turns.append(turn)
            equal = story.plain.answers[i] == story.warm.answers[i]
            table.add_row(
                str(i + 1),
                str(turn.prompt_tokens),
                f"{story.plain_turns[-1].ttft_ms:.0f} ms",
                f"{turn.ttft_ms:.0f} ms",
                f"{turn.cached_tokens / turn.prompt_tokens:.0%}",
                f"worker-{worker}",
                "[green]yes[/green]" if equal else "[yellow]no[/yellow]",
            )
            node.settle()
    console.print()
    return story


class _quiet:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _agreement(story: Story) -> float:
    """Share of answer tokens that equal those without cache, place by place."""
    pairs = [
        (a, b) for x, y in zip(story.plain.answers, story.warm.answers, strict=True) for a, b in zip(x, y, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def _verdict(demo: Story, eight: Story, real: Story | None) -> bool:
    good, bad = "[bold green]yes[/bold green]", "[bold red]NO[/bold red]"
    lines = [
        f"Answers equal those without cache, after both kills: {good if demo.identical else bad} "
        "(16-bit storage, every token of every turn)",
        f"Reuse: {demo.reuse_of_ideal:.1%} of what could be reused at all",
        f"With 8-bit storage {_agreement(eight):.1%} of the tokens agree"
        + (", all answers are equal" if eight.identical else ""),
    ]
    ok = demo.identical and demo.reuse_of_ideal >= 0.99
    if real is not None:
        first, last = real.warm_turns[0].ttft_ms, real.warm_turns[-1].ttft_ms
        lines += [
            f"At a real model's size the last turn's first token came [bold]{real.speedup:.1f} times[/bold] sooner: "
            f"{real.plain_turns[-1].ttft_ms:.0f} ms without cache, {last:.0f} ms with it "
            f"({first:.0f} ms at the first turn)",
            f"There too, all answers equal: {good if real.identical else bad}; "
            f"reuse {real.reuse_of_ideal:.1%} of the ideal",
        ]
        ok = ok and real.identical
    console.print(Panel("\n".join(lines), title="verdict", border_style="green" if ok else "red"))
    return ok


_NEXT = """[bold]Try next[/bold]
  [cyan].venv/bin/kvsidecar serve --model demo[/cyan]        then, in another terminal:
  [cyan].venv/bin/kvsidecar chat[/cyan]
  [cyan]curl -s localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "hello"}]}'[/cyan]
  [cyan].venv/bin/kvsidecar cache stats[/cyan]
or from Python:
  [cyan]from inference_svc import Engine
  with Engine.from_pretrained("demo") as engine:
      print(engine.generate("Hello, I would like to", max_tokens=20))[/cyan]
--model takes a folder or a hub id of your own model as well."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--shape", default="shape:qwen2.5-0.5b", help="model of the second part; none leaves it out")
    parser.add_argument("--answer-tokens", type=int, default=96)
    options = parser.parse_args()
    began = time.monotonic()
    turns = json.loads(CONVERSATION.read_text(encoding="utf-8"))["turns"]
    console.print(Panel(__doc__ or "", title="KVSidecar", border_style="cyan"))

    with console.status("starting a cache daemon and two workers with the built-in model"):
        node = Node("demo", workers=2, storage_bits=16).__enter__()
    try:
        demo = play(node, turns, options.answer_tokens, "The built-in model (a few million parameters)", kill=True)
    finally:
        node.__exit__()
    with console.status("the same conversation with 8-bit storage"), Node("demo", storage_bits=8) as node:
        eight = play(node, turns, options.answer_tokens, "", kill=False)
    real: Story | None = None
    if options.shape != "none":
        console.print(
            "The built-in model is too small for prefill to hurt. The same story at a real model's size "
            f"([bold]{options.shape}[/bold], random weights: the times are real, the text is not):"
        )
        with console.status("starting two workers (a minute on a small machine)"):
            node = Node(options.shape, workers=2, storage_bits=16).__enter__()
        try:
            real = play(node, turns, options.answer_tokens, options.shape, kill=True)
        finally:
            node.__exit__()
    ok = _verdict(demo, eight, real)
    console.print(_NEXT, highlight=False)
    console.print(f"[dim]The demo took {time.monotonic() - began:.0f} s.[/dim]")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
