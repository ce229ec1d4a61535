"""Prompts in which a long beginning is shared by many and a short end is each one's own.

The text is made of common English words in random order: so no server has read it before, and tokenizers make little
more than a token of each word.
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
    """How many different beginnings there are, and how many words beginnings and ends have."""

    prefixes: int
    prefix_words: int
    question_words: int


@dataclass(frozen=True)
class Prompt:
    """``first`` is the only one that shares its beginning with none before it."""

    text: str
    first: bool


def prompts(shape: Shape, requests: int, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """One prompt for each beginning, and after these ``requests`` ones that go on from them, evenly and in random
    order. The same seed makes the same prompts."""
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
