"""Demo with a real model: one question over the same documents in another order.

The first prompt stores the documents. The second one has them in another order, before another question. The node's
workers run with --reuse-anywhere.
"""

from __future__ import annotations

import json
import random

from kvsidecar import Completion
from rich.markup import escape

from benchmarks import report
from benchmarks.node import Node
from benchmarks.real_prompts import SAMPLE

DOCUMENTS, WORDS = 10, 100
QUESTIONS = ("Which of the texts is about errors?", "What are the texts about?")
console = report.console


def documents() -> list[str]:
    """Return texts of equal length from the sample."""
    lines = [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]
    words = " ".join(part for line in lines if line["kind"] == "documents" for part in line["parts"]).split()
    return [" ".join(words[at : at + WORDS]) for at in range(0, DOCUMENTS * WORDS, WORDS)]


def play(node: Node, worker: int = 0, answer_tokens: int = 24) -> bool:
    """Ask over documents in two orders. Return True if the second prompt's documents came from the cache."""
    client, texts = node.client(worker), documents()
    console.rule(f"Retrieval: {DOCUMENTS} documents in another order, with --reuse-anywhere")
    client.generate(_messages(texts, QUESTIONS[0]), max_tokens=answer_tokens, temperature=0)
    node.settle()
    random.Random(1).shuffle(texts)
    asked = _messages(texts, QUESTIONS[1])
    options = {"max_tokens": answer_tokens, "temperature": 0}
    plain = client.generate(asked, skip_cache=True, **options)  # type: ignore[arg-type]
    found = client.generate(asked, **options)  # type: ignore[arg-type]
    _show(plain, found, client.model().reuse_anywhere.sentence)
    return found.cached_tokens > 0.9 * found.prompt_tokens


def _messages(texts: list[str], question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n\n".join([*texts, question])}]


def _show(plain: Completion, found: Completion, state: str) -> None:
    console.print(f"\n[bold]{escape(QUESTIONS[1])}[/bold]\n{escape(found.text.strip())}", highlight=False)
    same = "the same answer" if plain.token_ids == found.token_ids else "another answer, as reuse anywhere may give"
    console.print(
        f"[bold]{found.cached_tokens} of {found.prompt_tokens}[/bold] tokens cached, {found.recomputed_tokens} of them "
        f"computed again[dim]; the first token after [/dim]{plain.ttft_ms:.0f} ms[dim] without the cache, [/dim]"
        f"{found.ttft_ms:.0f} ms[dim] with it; {same}[/dim]\n[dim]{escape(state)}[/dim]",
        highlight=False,
    )
