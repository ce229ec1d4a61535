"""Small functions with one planted bug, which the model must find."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

# Each line of the file has a function, the number of the line to replace (from 1), and its replacement.
_FUNCTIONS = Path(__file__).parent / "data" / "functions.jsonl"


@dataclass(frozen=True)
class PlantedBug:
    """Functions with numbered lines, one of which has the bug; the question; and the number of that line."""

    functions: tuple[str, ...]
    question: str
    line: int


def planted_bug(rng: random.Random, functions: int) -> PlantedBug:
    """Draw ``functions`` distinct functions and plant a bug in one of them. Lines are numbered consecutively."""
    known = [json.loads(line) for line in _FUNCTIONS.read_text(encoding="utf-8").splitlines()]
    chosen, broken = rng.sample(known, functions), rng.randrange(functions)
    out, number, line = [], 0, 0
    for i, function in enumerate(chosen):
        lines = function["source"].split("\n")
        if i == broken:
            lines[function["line"] - 1] = function["bug"]
            line = number + function["line"]
        out.append("\n".join(f"{number + n}: {text}" for n, text in enumerate(lines, 1)))
        number += len(lines)
    name = chosen[broken]["source"].split("(")[0].removeprefix("def ")
    return PlantedBug(tuple(out), f"Question: The function {name} has a bug. Which line is wrong?\nAnswer: line", line)
