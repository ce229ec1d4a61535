"""Answers of a model that draws any token that a grammar allows."""

from __future__ import annotations

import random

import numpy as np

from inference_svc.structured_output.grammar_state import GrammarState
from tests.inference_svc.sequence.test_detokenizer import END, TOKENIZER

# Drawn more often, or it would write every name letter by letter; and the end, where there may be one.
_LONG = frozenset(i for i in range(len(TOKENIZER)) if len(TOKENIZER.decode([i])) > 1) | END


def walk(steering: GrammarState, seed: int, most: int = 3000) -> list[int]:
    """The tokens of one answer."""
    chance, tokens = random.Random(seed), list[int]()
    while not steering.complete:
        allowed = np.flatnonzero(np.unpackbits(steering.mask(), bitorder="little")).tolist()
        long = [token for token in allowed if token in _LONG]
        tokens.append(chance.choice(long if long and chance.random() < 0.5 else allowed))
        steering.accept(tokens[-1])
        assert len(tokens) < most
    return tokens
