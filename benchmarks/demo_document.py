"""Demo with a real model: computes a document once, through two kills.

The demo kills worker 0, and worker 1 continues. It then kills the cache daemon, and a new worker 0 answers from the
chunks on disk. It also asks every question without the cache; the answers must be equal, token by token.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path

from kvsidecar import Completion
from rich.markup import escape
from rich.panel import Panel

from benchmarks import report
from benchmarks.node import Node

DOCUMENT = Path(__file__).parent / "data" / "governance.md"
# The document and the question are one message, because a small model then answers better.
_BEFORE, _BEHIND = "Read this text:\n\n", "\n\nUsing the text, answer in one short sentence. "
QUESTIONS = (
    "How many people are on the steering council?",
    "How long does the vote of no confidence last?",
    "When is a new council elected?",
    "Who manages the election process?",
    "How is the winner chosen if there is a tie?",
    "How many stars can a core team member assign to a candidate?",
)
KILL_WORKER_AFTER, KILL_DAEMON_AFTER = 2, 4
console = report.console


@dataclass
class QuestionAnswers:
    """Answers to every question, without the cache and with it."""

    plain: list[Completion] = field(default_factory=list)
    warm: list[Completion] = field(default_factory=list)

    @property
    def equal(self) -> list[bool]:
        return [p.token_ids == w.token_ids for p, w in zip(self.plain, self.warm, strict=True)]

    @property
    def later(self) -> list[tuple[Completion, Completion]]:
        """Return the answers after the first question, which cannot reuse anything."""
        return list(zip(self.plain, self.warm, strict=True))[1:]

    @property
    def speedup(self) -> float:
        return statistics.median(p.ttft_ms / w.ttft_ms for p, w in self.later)

    @property
    def reused(self) -> float:
        return sum(w.cached_tokens for _, w in self.later) / sum(w.prompt_tokens for _, w in self.later)


def document() -> str:
    """Return the document, without the comment about its source."""
    return DOCUMENT.read_text(encoding="utf-8").partition("-->")[2].strip()


def play(node: Node, questions: tuple[str, ...] = QUESTIONS, answer_tokens: int = 40) -> QuestionAnswers:
    """Ask the questions on a node with two workers; kill worker 0 and the daemon in between."""
    asked, worker, text = QuestionAnswers(), 0, document()
    console.print(
        f"The document: {len(text.split()):,} words of PEP 13, which says how Python is governed. SmolLM2 is small "
        "(135 million weights) and often wrong. What counts here is that it says the same with the cache and without, "
        "and how soon it begins.",
        highlight=False,
    )
    for i, question in enumerate(questions):
        if i == KILL_WORKER_AFTER:
            node.kill("worker-0")
            worker = 1
            console.rule("[red]kill -9: worker-0; worker-1, which never saw the document, goes on")
        if i == KILL_DAEMON_AFTER:
            worker = 0
            console.rule("[red]kill -9: the cache daemon, with all that was in memory")
            node.kill("daemon")
            with console.status("starting it again, and a new worker-0"):
                node.start_daemon()
                node.start_worker(0)
        messages = [{"role": "user", "content": _BEFORE + text + _BEHIND + question}]
        client = node.client(worker)
        asked.plain.append(client.generate(messages, max_tokens=answer_tokens, temperature=0, skip_cache=True))
        exact = client.generate(messages, max_tokens=answer_tokens, temperature=0, reuse_anywhere=False)
        asked.warm.append(exact)
        _show(question, asked.plain[-1], asked.warm[-1], worker)
        node.settle()
    return asked


def _show(question: str, plain: Completion, warm: Completion, worker: int) -> None:
    equal = "[green]equal[/green]" if plain.token_ids == warm.token_ids else "[red]NOT EQUAL[/red]"
    console.print(f"\n[bold]{escape(question)}[/bold]\n{escape(warm.text.strip())}", highlight=False)
    console.print(
        f"[dim]worker-{worker}, {warm.prompt_tokens} tokens: the first token after [/dim]{plain.ttft_ms:.0f} ms[dim] "
        f"without the cache, [/dim]{warm.ttft_ms:.0f} ms[dim] with it ({warm.cached_tokens / warm.prompt_tokens:.0%} "
        f"reused); answers [/dim]{equal}",
        highlight=False,
    )


def verdict(asked: QuestionAnswers) -> bool:
    """Print the result. Return True if all answers were equal and the document was computed once."""
    ok = all(asked.equal) and asked.reused > 0.9
    word = "[bold green]yes[/bold green]" if all(asked.equal) else "[bold red]NO[/bold red]"
    lines = [
        f"Answers equal those without the cache, before and after both kills: {word} "
        f"({sum(asked.equal)} of {len(asked.equal)}, token by token)",
        f"Reused after the first question: {asked.reused:.1%} of the tokens, also right after the kills",
        f"The first token came [bold]{asked.speedup:.0f} times[/bold] sooner (median of {len(asked.later)} questions)",
    ]
    console.print()
    console.print(Panel("\n".join(lines), title="verdict", border_style="green" if ok else "red"))
    return ok
