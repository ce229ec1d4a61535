"""Every text that a schema with ``uniqueItems`` leads to is valid, every one that is valid is led to, and no way ends
before: by following all of them, byte by byte."""

from __future__ import annotations

import json
from itertools import permutations, product
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from inference_svc.structured_output.schema_normalize import plain
from inference_svc.unique.compiling import places_of
from inference_svc.unique.matcher import UniqueMatcher
from inference_svc.unique.vocabulary import Vocabulary
from inference_svc.unique.watch import Watch

BYTES = LLTokenizer("byte")
WORDS = Vocabulary(BYTES)
NO_SPACE = {"whitespace_flexible": False}


def matcher_of(schema: dict[str, Any]) -> UniqueMatcher:
    source = LLMatcher.grammar_from_json_schema(plain({**schema, "x-guidance": NO_SPACE}, unique=False))
    tokens, by_bytes = (LLMatcher(BYTES, source, log_level=0) for _ in range(2))
    assert not tokens.is_error(), tokens.get_error()
    return UniqueMatcher(tokens, Watch(by_bytes, WORDS, places_of(schema, BYTES)), WORDS.texts)


def texts_of(matcher: UniqueMatcher, begun: bytes = b"") -> list[bytes]:
    """All texts that may be written from here."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    assert bits.any(), f"nothing may follow {begun!r}"
    found = [begun] if bits[BYTES.eos_token] else []
    for byte in np.flatnonzero(bits[:256]).tolist():
        other = matcher.deep_copy()
        assert other.consume_token(byte), begun
        found += texts_of(other, begun + bytes((byte,)))
    return found


def unique(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


def orders(values: list[Any], least: int, most: int) -> list[list[Any]]:
    return [list(one) for n in range(least, most + 1) for one in permutations(values, n)]


PAIR = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}, "required": ["a"],
        "additionalProperties": False}  # fmt: skip
PAIRS = [{"a": a, **b} for a in (1, 2) for b in ({}, {"b": True}, {"b": False})]
SUBSETS = [[], [1], [2], [1, 2], [2, 1]]


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        (unique({"enum": ["a", "ab", "abc", "b"]}), orders(["a", "ab", "abc", "b"], 0, 4)),
        (unique({"enum": ["a", "ab", "b"]}, minItems=2), orders(["a", "ab", "b"], 2, 3)),
        (unique({"enum": ["a\nb", "a\tb"]}), orders(["a\nb", "a\tb"], 0, 2)),
        (unique({"enum": [1, True, "1", None]}, maxItems=3), orders([1, True, "1", None], 0, 3)),
        (unique({"type": ["boolean", "null"]}, minItems=1), orders([True, False, None], 1, 3)),
        (unique({"type": "integer", "minimum": 9, "maximum": 12}), orders([9, 10, 11, 12], 0, 4)),
        (unique({"type": "integer", "minimum": -1, "maximum": 1}, minItems=3), orders([-1, 0, 1], 3, 3)),
        (unique({"type": "string", "pattern": "^[ab]{0,1}$"}, minItems=3), orders(["", "a", "b"], 3, 3)),
        (unique(PAIR, maxItems=2), orders(PAIRS, 0, 2)),
        (unique(unique({"enum": [1, 2]})), orders(SUBSETS, 0, 5)),
        (unique(unique({"enum": [1, 2]}, minItems=1), minItems=4), orders(SUBSETS[1:], 4, 4)),
        (unique({"type": "array", "items": {"enum": [1]}, "maxItems": 2}), orders([[], [1], [1, 1]], 0, 3)),
        (
            {"type": "array", "items": unique({"enum": [1, 2]}), "minItems": 2, "maxItems": 2},
            [list(one) for one in product(SUBSETS, SUBSETS)],
        ),
        (
            {"anyOf": [unique({"type": "boolean"}, minItems=2), {"type": "null"}]},
            [None, *orders([True, False], 2, 2)],
        ),
        (
            {"type": "array", "prefixItems": [{"enum": ["x"]}, {"enum": ["x", "y"]}], "items": False,
             "uniqueItems": True},
            [[], ["x"], ["x", "y"]],
        ),
        (
            {"$defs": {"n": {"type": "null"}, "s": unique({"$ref": "#/$defs/n"})}, "type": "object",
             "properties": {"s": {"$ref": "#/$defs/s"}}, "required": ["s"], "additionalProperties": False},
            [{"s": []}, {"s": [None]}],
        ),
        (
            {"allOf": [{"type": "array", "items": {"type": "boolean"}}, {"uniqueItems": True}]},
            orders([True, False], 0, 2),
        ),
    ],
)  # fmt: skip
def test_all_that_is_valid_and_nothing_else(schema: dict[str, Any], values: list[Any]) -> None:
    found = [json.loads(text) for text in texts_of(matcher_of(schema))]
    validator = jsonschema.Draft202012Validator(schema)
    assert all(validator.is_valid(value) for value in found)
    assert set(map(json.dumps, found)) == set(map(json.dumps, values))
