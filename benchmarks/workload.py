"""Conversations to replay, from a JSONL file or synthetic."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Words of the training text of the shipped tokenizer, which encodes most of them as one token.
_WORDS = (
    "the and you for that with have this would like please can find want need time day place room table book hotel "
    "train ticket movie music city area price good number people date name order coffee drink size large small hot "
    "what where when which how much is there in on at to of a"
).split()
# Number of words in a synthetic user turn. With 96 answer tokens per turn, eight turns have about 1,100 tokens.
_SYNTHETIC_WORDS = 48


@dataclass(frozen=True)
class Conversation:
    """A conversation. A turn is a pair: the user's text, and the recorded answer."""

    id: str
    turns: tuple[tuple[str, str], ...]


def read(workload: str, conversations: int, turns: int) -> list[Conversation]:
    """Read ``synthetic:SEED`` or a file of ``{"id", "turns": [{"user", "assistant"}]}``."""
    if workload.startswith("synthetic:"):
        return [_synthetic(int(workload.split(":")[1]), i, turns) for i in range(conversations)]
    out = []
    for line in Path(workload).read_text(encoding="utf-8").rstrip().split("\n"):
        item = json.loads(line)
        if len(item["turns"]) >= turns:
            pairs = tuple((t["user"], t["assistant"]) for t in item["turns"][:turns])
            out.append(Conversation(str(item["id"]), pairs))
        if len(out) == conversations:
            return out
    raise SystemExit(f"{workload} has {len(out)} conversations of {turns} turns; {conversations} were asked for")


def _synthetic(seed: int, index: int, turns: int) -> Conversation:
    rng = random.Random(f"{seed}:{index}")
    said = tuple((_words(rng, _SYNTHETIC_WORDS), _words(rng, 80)) for _ in range(turns))
    return Conversation(f"synthetic-{seed}-{index}", said)


def words(seed: str, count: int) -> str:
    """Return a text of ``count`` random words; equal seeds give equal texts."""
    return _words(random.Random(seed), count)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def turn_tokens(tokenize: Callable[[str], list[int]], text: str, first: bool) -> list[int]:
    """Tokenize a user's turn in the shipped chat template, up to the start of the assistant's turn."""
    return tokenize(("<|bos|>" if first else "<|end|>") + f"<|user|>{text}<|end|><|assistant|>")
