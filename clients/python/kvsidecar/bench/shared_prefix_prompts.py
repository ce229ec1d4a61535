"""Prompts with a long shared prefix and a short individual suffix.

The text consists of common English words in random order. So no server has it cached, and tokenizers need little more
than one token per word.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city name team minute idea body back parent face level office door health "
    "person art war history party result change morning reason research girl guy moment air teacher force education"
).split()


@dataclass(frozen=True)
class Shape:
    """Number of prefixes, and the words of a prefix and of a suffix."""

    prefixes: int
    prefix_words: int
    question_words: int


@dataclass(frozen=True)
class Prompt:
    """A prompt; ``first`` is True for the first prompt with a prefix."""

    text: str
    first: bool


def prompts(shape: Shape, requests: int, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Return one prompt per prefix, and ``requests`` further prompts in random order.

    The further prompts are spread evenly over the prefixes. The same seed makes the same prompts.
    """
    rng = random.Random(seed)
    beginnings = [_text(rng, shape.prefix_words) for _ in range(shape.prefixes)]

    def ended(beginning: str, first: bool) -> Prompt:
        return Prompt(f"{beginning} {_text(rng, shape.question_words)}".strip(), first)

    firsts = [ended(beginning, True) for beginning in beginnings]
    others = [ended(beginnings[i % len(beginnings)], False) for i in range(requests)]
    rng.shuffle(others)
    return firsts, others


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(words))
