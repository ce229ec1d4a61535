"""What a user relies on: the same answers, word by word, after everything was restarted, with the default settings."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from kvsidecar import Completion
from kvsidecar.errors import Unavailable
from kvsidecar.models.model_pull import pull

from benchmarks.demo_document import document
from benchmarks.node import Node

PROMPTS, WORDS, ANSWER_TOKENS = 30, 400, 40


def prompts() -> list[str]:
    """Sentences of a real document in random orders, 400 words each."""
    sentences = [" ".join(s.split()) for s in document().replace("\n\n", ". ").split(". ") if len(s.split()) > 3]
    out = []
    for seed in range(PROMPTS):
        rng, words = random.Random(seed), list[str]()
        while len(words) < WORDS:
            words += f"{rng.choice(sentences)}.".split()
        out.append(" ".join(words[:WORDS]))
    return out


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("model", ["demo", "smollm2"])
def test_answers_are_the_same_after_a_restart(model: str, tmp_path: Path) -> None:
    if model != "demo":
        try:
            pull(model)
        except Unavailable as error:
            pytest.skip(str(error))

    def answers(node: Node) -> list[Completion]:
        return [node.client().generate(text, max_tokens=ANSWER_TOKENS, temperature=0) for text in prompts()]

    # No --storage-bits: the worker's own default.
    with Node(model, storage_bits=None, daemon_flags={"store": tmp_path / "store"}) as node:
        first = answers(node)
        node.settle()
    with Node(model, storage_bits=None, daemon_flags={"store": tmp_path / "store"}) as node:
        second = answers(node)
    assert [a.token_ids for a in second] == [a.token_ids for a in first]
    assert all(a.cached_tokens == a.prompt_tokens - 1 for a in second), "every prompt was found again"
    assert len({tuple(a.token_ids) for a in first}) > 1
