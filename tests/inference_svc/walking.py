"""Answers of a model that draws a random token from those that a grammar allows."""

from __future__ import annotations

import random

import numpy as np

from inference_svc.structured_output.grammar_state import GrammarState
from tests.inference_svc.sequence.test_detokenizer import END, TOKENIZER

# These tokens are drawn more often, so that names and answers end soon.
_LONG = frozenset(i for i in range(len(TOKENIZER)) if len(TOKENIZER.decode([i])) > 1) | END


def walk(steering: GrammarState, seed: int, most: int = 3000) -> list[int]:
    """Return the tokens of one random answer."""
    chance, tokens = random.Random(seed), list[int]()
    while not steering.complete:
        allowed = np.flatnonzero(np.unpackbits(steering.mask(), bitorder="little")).tolist()
        long = [token for token in allowed if token in _LONG]
        tokens.append(chance.choice(long if long and chance.random() < 0.5 else allowed))
        steering.accept(tokens[-1])
        assert len(tokens) < most
    return tokens
