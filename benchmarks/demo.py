"""Demo: a text is computed once, and its cache survives the kill of a worker and of the daemon.

Two workers share one cache daemon. During the conversation, the demo kills the first worker and later the daemon. It
also asks every question without the cache. The answers are equal; with the cache, no text is computed twice. At the
end, SmolLM2 answers over documents in another order, with reuse anywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvsidecar.errors import KVSidecarError
from kvsidecar.models.catalogue import DEFAULT
from kvsidecar.models.model_pull import prepare, pull
from kvsidecar.process.sigint import EXIT_CODE
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from benchmarks import demo_document, demo_retrieval, report
from benchmarks.node import Node
from benchmarks.replay import History, Turn, ask
from benchmarks.workload import turn_tokens

CONVERSATION = Path(__file__).parent / "data" / "conversation.json"
KILL_WORKER_AFTER, KILL_DAEMON_AFTER = 4, 6
console = report.console


@dataclass
class Story:
    """One conversation on a node, with and without the cache."""

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


def play(node: Node, turns: list[str], answer_tokens: int, title: str) -> Story:
    """Play a conversation turn by turn; kill worker 0 and the daemon in between."""
    story, worker, table = Story(), 0, _table(title)
    with Live(table, console=console, refresh_per_second=8):
        for i, text in enumerate(turns):
            if i == KILL_WORKER_AFTER:
                node.kill("worker-0")
                worker = 1
                table.add_row("", "", "", "", "", "[red]worker-0 killed (SIGKILL)[/red]", "", end_section=True)
            if i == KILL_DAEMON_AFTER:
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


def _verdict(demo: Story, real: Story | None) -> bool:
    good, bad = "[bold green]yes[/bold green]", "[bold red]NO[/bold red]"
    lines = [
        f"Answers equal those without cache, after both kills: {good if demo.identical else bad} "
        "(every token of every turn)",
        f"Reuse: {demo.reuse_of_ideal:.1%} of what could be reused at all",
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
  [cyan].venv/bin/kvsidecar serve{model}[/cyan]        then, in another terminal:
  [cyan].venv/bin/kvsidecar chat[/cyan]
  [cyan]curl -s localhost:8000/v1/chat/completions \\
    -d '{{"messages": [{{"role": "user", "content": "What is the capital of Germany?"}}]}}'[/cyan]
  [cyan].venv/bin/kvsidecar cache stats[/cyan]
serve takes a folder, a GGUF file or a hub id of your own model as well."""


def real_model() -> bool:
    """Return True if SmolLM2 is installed or can be fetched; otherwise print the reason."""
    try:
        with console.status("fetching SmolLM2, unless it is here"):
            pull(DEFAULT, say=lambda text: console.print(text, highlight=False))
    except KVSidecarError as error:
        console.print(
            f"[yellow]No SmolLM2: {error}. So the story is played with the built-in model, which is no assistant and "
            "talks gibberish; the times and the equality are real.[/yellow]",
            highlight=False,
        )
        return False
    with console.status("writing it out for fast starts, unless that was done before"):
        return prepare(DEFAULT) == 0


def with_real_model() -> bool:
    """Run the demo with SmolLM2, which answers questions about a document."""
    with console.status("starting a cache daemon and two workers with SmolLM2"):
        node = Node(DEFAULT, workers=2, storage_bits=16, worker_flags={"reuse_anywhere": True}).__enter__()
    try:
        equal = demo_document.verdict(demo_document.play(node))
        return demo_retrieval.play(node) and equal
    finally:
        node.__exit__()


def with_built_in_model(turns: list[str], answer_tokens: int, shape: str) -> bool:
    """Play a conversation with the built-in model, then one with random weights of a real model's size."""
    with console.status("starting a cache daemon and two workers with the built-in model"):
        node = Node("demo", workers=2, storage_bits=16).__enter__()
    try:
        demo = play(node, turns, answer_tokens, "The built-in model (a few million parameters)")
    finally:
        node.__exit__()
    real: Story | None = None
    if shape != "none":
        console.print(
            "The built-in model is too small for prefill to hurt. The same story at a real model's size "
            f"([bold]{shape}[/bold], random weights: the times are real, the text is not):"
        )
        with console.status("starting two workers (a minute on a small machine)"):
            node = Node(shape, workers=2, storage_bits=16).__enter__()
        try:
            real = play(node, turns, answer_tokens, shape)
        finally:
            node.__exit__()
    return _verdict(demo, real)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--model", choices=["auto", DEFAULT, "demo"], default="auto", help="auto: smollm2 if available")
    parser.add_argument(
        "--shape", default="shape:qwen2.5-0.5b", help="shape of the second part's random model, or none"
    )
    parser.add_argument(
        "--answer-tokens", type=report.at_least(1), default=96, help="answer length of the built-in model"
    )
    options = parser.parse_args()
    began = time.monotonic()
    text = "\n\n".join(" ".join(part.split()) for part in (__doc__ or "").split("\n\n"))
    console.print(Panel(text, title="KVSidecar", border_style="cyan"))
    real = options.model != "demo" and real_model()
    if options.model == DEFAULT and not real:
        return 1
    if real:
        ok = with_real_model()
    else:
        turns = json.loads(CONVERSATION.read_text(encoding="utf-8"))["turns"]
        ok = with_built_in_model(turns, options.answer_tokens, options.shape)
    console.print(_NEXT.format(model="" if real else " demo"), highlight=False)
    console.print(f"[dim]The demo took {time.monotonic() - began:.0f} s.[/dim]")
    return 0 if ok else 1


if __name__ == "__main__":
    report.exit_on_sigterm()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(EXIT_CODE)
