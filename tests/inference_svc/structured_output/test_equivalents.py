"""Schemas in fewer keywords allow the same: each is held against the same values by a validator of the whole
specification, before and after, and by the compiler, which may not know the one before."""

from __future__ import annotations

import json
import random
import re
from itertools import product
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from inference_svc.complement import NotWritten, complement
from inference_svc.equivalents import rewritten
from inference_svc.lookaround import looks_around, without_looking

BYTES = LLTokenizer("byte")
TEXT = {"type": "string"}
# Objects of a few members, and what is none.
MEMBERS = [dict(zip("abc", values, strict=True)) for values in product([None, "x", "y", 1], repeat=3)]
VALUES: list[Any] = [{k: v for k, v in m.items() if v is not None} for m in MEMBERS] + [
    "x",
    "ax",
    "yz",
    1,
    2.5,
    True,
    None,
    [],
]
SCHEMAS: list[Any] = [
    {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b", "c"]}]},
    {"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["a", "b"]}, {"required": ["c"]}],
     "properties": {"a": TEXT}, "additionalProperties": False},
    {"oneOf": [{"type": "number"}, {"$ref": "#/$defs/e"}, {"type": "null"}], "$defs": {"e": TEXT}},
    {"type": "object", "dependencies": {"a": ["b"], "b": {"required": ["c"]}}},
    {"type": "object", "dependentRequired": {"a": ["b", "c"]}, "dependentSchemas": {"c": {"properties": {"c": TEXT}}}},
    {"not": {"required": ["a"]}},
    {"type": ["object", "null"], "not": {"required": ["a", "b"]}},
    {"type": "object", "not": {"anyOf": [{"required": ["a", "b"]}, {"required": ["c"]}]}},
    {"type": "string", "not": {"const": "x"}},
    {"type": ["string", "null"], "not": {"pattern": "x"}},
    {"type": "string", "not": {"type": "string", "enum": ["x", "y"]}},
    {"enum": ["x", 1, None], "not": {"enum": ["x", None]}},
    {"type": "string", "not": {"enum": ["x", None, 1]}},
    {"type": "string", "not": {"const": 1}},
    {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": TEXT},
     "if": {"properties": {"a": {"const": "x"}}}, "then": {"required": ["b"]}, "else": {"required": ["c"]}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/k"}}, "$defs": {"k": {"enum": ["x", "y"]}},
     "if": {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]}, "then": {"required": ["b"]}},
    {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties": TEXT},
    {"type": "object", "propertyNames": {"enum": ["a", "c"]}, "properties": {"a": TEXT, "b": TEXT}},
    {"type": "object", "propertyNames": {"type": "string", "maxLength": 1}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?!x).*$"}}},
    {"$schema": "https://example.com/somebodys/own.json", "type": "string"},
]  # fmt: skip
PATTERNS = [
    "^(?!aws|[sb]:$)[abws:]*$",
    "^(?!$)(?:a|s)*$",
    "^(?!aws:)[abws:]*$",
    "^(?!aw)(?!b)[abws:]{1,3}$",
    "^(?!.*-$)(?!.*[-]{2})[a-]+$",
    "^[a-]*(?<!-)$",
    "^(?:(?!as+:)[as:])+$",
    "(?!^a+$)([as]+)",
    "^(?![a:])[as:]+$|^a(s|:)$",
    r"^(?=.*[A-Z])(?=.*\d)(?!.*\s)[A-Za-z\d\s]{3,}$",
]


def compiled(schema: Any) -> LLMatcher:
    source = LLMatcher.grammar_from_json_schema({**schema, "x-guidance": {"whitespace_flexible": False}})
    return LLMatcher(BYTES, source, log_level=0, limits=LLParserLimits(verbose_errors=False))


def accepts(matcher: LLMatcher, value: Any) -> bool:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    tried = matcher.deep_copy()
    return tried.try_consume_tokens(list(text)) == len(text) and tried.is_accepting()


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: "-".join(s))
def test_the_same_values_are_allowed(schema: Any) -> None:
    other = rewritten(schema)
    assert other != schema
    before, after = (jsonschema.Draft202012Validator(one) for one in (schema, other))
    if "dependencies" in schema:
        before = jsonschema.Draft7Validator(schema)
    matcher = compiled(other)
    assert not matcher.is_error(), matcher.get_error()
    for value in VALUES:
        valid = before.is_valid(value)
        assert after.is_valid(value) == valid, value
        assert not accepts(matcher, value) or valid, value
    assert any(accepts(matcher, value) for value in VALUES if before.is_valid(value))


def test_numbers_that_are_equal_in_other_words_are_left_to_the_compiler() -> None:
    for schema in ({"enum": [1.0, 2], "not": {"const": 1}}, {"enum": [1, 2], "not": {"const": 1.0}}):
        assert rewritten(schema) == schema


def test_too_many_alternatives_are_left_to_the_compiler() -> None:
    for count in (64, 65, 3000):
        schema = {"oneOf": [{"required": ["a"]}, *({"required": ["a", "b"]} for _ in range(count - 1))]}
        assert ("oneOf" in rewritten(schema)) == (count > 64)


def found(pattern: str, text: str) -> bool:
    """By Python, to which ``$`` is the very end, as it is to the compiler."""
    return re.search(pattern.replace("$", r"\Z"), text) is not None


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_without_looking_around_find_the_same(pattern: str) -> None:
    ways = without_looking(pattern)
    assert not any(looks_around(one) for way in ways for one in way)
    other = rewritten({"type": "string", "pattern": pattern, "maxLength": 12})
    matcher = compiled(other)
    assert not matcher.is_error(), matcher.get_error()
    chance, seen = random.Random(7), set[bool]()
    for _ in range(1500):
        text = "".join(
            chance.choice(["aws:", "a", "s", "b", "-", ":", "A7", "x", " "]) for _ in range(chance.randrange(5))
        )
        expected = re.search(pattern, text) is not None
        seen.add(expected)
        assert any(all(found(one, text) for one in way) for way in ways) == expected, text
        assert accepts(matcher, text) == (expected and len(text) <= 12), text
    assert seen == {True, False}


@pytest.mark.parametrize("pattern", ["^ab", "ab$", "a{2,3}b|^b", r"[^a]\s", "(ab|ba)+", "^(?:a|b.)$", "a?b?:"])
def test_a_complement_has_every_other_text_of_a_line(pattern: str) -> None:
    other = complement(pattern)
    for length in range(5):
        for letters in product("ab: c", repeat=length):
            text = "".join(letters)
            assert found(other, text) != (re.search(pattern, text) is not None), text
    for text in ("ab\n", "a\n:", "\nab"):
        assert not (found(other, text) and re.search(pattern, text)), text


@pytest.mark.parametrize(
    "pattern", [r"(a)\1", r"\w", "^", "a{,3}b", "(?i)a", "(", "a{9999}", ".{40}a.{40}b|(x{20}y){3}", r"a\b"]
)
def test_what_is_not_written_is_said(pattern: str) -> None:
    with pytest.raises(NotWritten):
        complement(pattern)


WORDS = (
    "type properties required enum const anyOf allOf oneOf $ref pattern minLength not if then else dependencies"
    " propertyNames dependentRequired additionalProperties a #/properties/a #"
).split()
GARBAGE = st.recursive(
    st.sampled_from(["string", "object", "a", "#/properties/a", "#", "^(?!a)b", "(?<!(", 3, -1.5, True, None]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.sampled_from(WORDS), GARBAGE, max_size=4))
def test_no_garbage_is_more_than_refused(schema: dict[str, Any]) -> None:
    """And what is valid after is valid before."""
    after = compiled(rewritten(schema))
    try:
        before = jsonschema.Draft202012Validator(schema)
        allowed = [value for value in VALUES if before.is_valid(value)]
    except Exception:  # no schema, or one that refers to itself for ever
        return
    if not after.is_error():
        assert all(value in allowed for value in VALUES if accepts(after, value))


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": 3, "not": {"required": ["a"]}}, {"propertyNames": {"pattern": {"a": 1}}},
        {"propertyNames": {"minLength": "x"}}, {"type": "string", "not": {"pattern": 3}},
        {"pattern": "a(?=b)b"}, {"pattern": "(?<=a)b"}, {"pattern": "(?!a"}, {"not": {"multipleOf": 3}}, {"oneOf": 3},
        {"oneOf": [{"minimum": 1}, {"maximum": 3}]}, {"if": True, "then": {}}, {"propertyNames": {"format": "date"}},
        {"dependencies": 3}, {"not": {"$ref": "#/not"}}, {"if": {"properties": 3}}, {"not": {"required": [1]}},
        {"dependentRequired": {str(i): ["a"] for i in range(99)}}, {"not": {"const": [1]}, "type": "array"},
        {"oneOf": [{"required": [f"{i}{j}" for j in range(3)]} for i in range(9)]},
    ],
)  # fmt: skip
def test_what_is_not_known_stays_for_the_compiler_to_refuse(schema: Any) -> None:
    assert rewritten(schema) == schema
    assert rewritten({"$defs": {"a": schema}, "const": {"pattern": "(?!a)b"}})["const"] == {"pattern": "(?!a)b"}
