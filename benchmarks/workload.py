"""Conversations to replay: from a JSONL file, or synthetic."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Words of the shipped tokenizer's training text; about one token each.
_WORDS = (
    "the and you for that with have this would like please can find want need time day place room table book hotel "
    "train ticket movie music city area price good number people date name order coffee drink size large small hot "
    "what where when which how much is there in on at to of a"
).split()
# Words of a synthetic user turn; with 96 answer tokens, eight turns have about 1,100 tokens.
_SYNTHETIC_WORDS = 48


@dataclass(frozen=True)
class Conversation:
    """Conversation of ``(user, recorded assistant)`` turns."""

    id: str
    turns: tuple[tuple[str, str], ...]


def read(workload: str, conversations: int, turns: int) -> list[Conversation]:
    """Read ``synthetic:SEED`` or a file of ``{"id", "turns": [{"user", "assistant"}]}``."""
    if workload.startswith("synthetic:"):
        return [_synthetic(int(workload.split(":")[1]), i, turns) for i in range(conversations)]
    out = []
    for line in Path(workload).read_text(encoding="utf-8").splitlines():
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
    """Return a text of ``count`` words, deterministic in ``seed``."""
    return _words(random.Random(seed), count)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def turn_tokens(tokenize: Callable[[str], list[int]], text: str, first: bool) -> list[int]:
    """Tokenize a user's turn in the shipped chat template, up to the assistant's beginning."""
    return tokenize(("<|bos|>" if first else "<|end|>") + f"<|user|>{text}<|end|><|assistant|>")
