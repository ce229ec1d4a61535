"""Arrays without duplicates by a model that would rather repeat itself: every answer is valid, and none is stuck."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.sampling.sampler import draw
from inference_svc.sampling.sampling_params import Drawn, Sampler, SamplingParams
from inference_svc.structured_output.grammar_compiler import Grammars
from inference_svc.structured_output.grammar_state import Steering
from inference_svc.unique.places import Places
from inference_svc.unique.scan import follow, start
from tests.inference_svc.engine.test_detokenizer import END, TOKENIZER

GRAMMARS = Grammars(TOKENIZER, 4096, END)
_TEXTS = [TOKENIZER.decode([token]) for token in range(len(TOKENIZER))]
# What a lazy model writes: little else than what it has written before.
_FEW = np.array([bool(text) and set(text) <= set('ab01[]{}",:-') for text in _TEXTS])
_MOST = 600

_SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": ["null", "boolean"]}),
    st.lists(st.sampled_from(["a", "ab", "b", "ba", 0, 1, 1.5, True, None]), min_size=1, max_size=5).map(
        lambda values: {"enum": [v for i, v in enumerate(values) if values.index(v) == i or v is True]}
    ),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-2, 9), st.integers(0, 4),
    ),
    st.integers(0, 2).map(lambda most: {"type": "string", "maxLength": most}),
    st.sampled_from(["^a*b?$", "^[ab]{1,2}$", "^(a|ab|b\\n)$"]).map(lambda p: {"type": "string", "pattern": p}),
    st.sampled_from(["string", "integer", "number"]).map(lambda kind: {"type": kind}),
    st.just({"type": "string", "format": "date"}),
)  # fmt: skip


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.builds(
        lambda items, least, more, unique: {
            "type": "array", "items": items, "minItems": least, "maxItems": least + more, "uniqueItems": unique,
        },
        inner, st.integers(0, 3), st.integers(0, 3), st.booleans(),
    )  # fmt: skip
    objects = st.builds(
        lambda a, b, closed: {
            "type": "object", "properties": {"a": a, "b": b}, "required": ["a"],
            "additionalProperties": not closed and a,
        },
        inner, inner, st.booleans(),
    )  # fmt: skip
    return st.one_of(arrays, objects, st.lists(inner, min_size=1, max_size=2).map(lambda some: {"anyOf": some}))


SCHEMAS = st.builds(
    lambda items, least: {"type": "array", "items": items, "minItems": least, "uniqueItems": True},
    st.recursive(_SCALARS, _nested, max_leaves=4), st.integers(0, 4),
)  # fmt: skip


def steering_of(schema: Any) -> Steering:
    return GRAMMARS.steering(pb.Grammar(json_schema=json.dumps(schema), json_whitespace=" ?"))


def answer(steering: Steering, seed: int) -> str | None:
    """None where it did not end in time."""
    chance, tokens = random.Random(seed), list[int]()
    while not steering.complete:
        allowed = np.unpackbits(steering.mask(), bitorder="little")[: len(_TEXTS)].astype(bool)
        few = np.flatnonzero(allowed & _FEW)
        ids = few if len(few) and chance.random() < 0.95 else np.flatnonzero(allowed)
        tokens.append(int(ids[chance.randrange(len(ids))]))
        steering.accept(tokens[-1])
        if len(tokens) > _MOST:
            return None
    return str(TOKENIZER.decode([token for token in tokens if token not in END]))


@settings(max_examples=60, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 30))
def test_every_answer_is_valid(schema: Any, seed: int) -> None:
    try:
        steering = steering_of(schema)
    except InvalidRequest as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert re.search("uniqueItems|nsatisfiable", refused), "it says why"
        return
    text = answer(steering, seed)
    if text is not None:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("items", "again"),
    [
        ("1", "1.0"), ("1", "1e0"), ("100", "1E+2"), ("0", "-0.0"), ("0.1", "0.1000000000000000000001"),
        ("9007199254740993", "9007199254740993.0"), ("9007199254740992", "9007199254740993.0"),
        ('"a"', '"\\u0061"'), ('"\U0001f600"', '"\\ud83d\\ude00"'), ('"\\n"', '"\\u000A"'), ('"\\ud83d"', '"\\uD83D"'),
        ('"\\ud83d\\ud83d\\ude00"', '"\\ud83d\U0001f600"'), ('{"a":1,"b":[]}', '{ "b" : [ ] , "\\u0061":1.0}'),
        ('{"a":1}', '{"a":2,"a":1}'), ("[[],{}]", "[ [\n], { }]"), ("true", "true"), ("null", "null"),
    ],
)  # fmt: skip
def test_what_is_equal(items: str, again: str) -> None:
    before = start(Places({"uniqueItems": True}).start)
    assert follow(before, f"[{items},{again} ".encode()) is None
    assert follow(before, f"[{items},[{again} ".encode()) is not None, "in another array it is new"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "true"), ("0", "false"), ('"1"', "1"), ('"null"', "null"), ("[]", "{}"), ("1", "-1"), ("1", "10"),
        ('"a"', '"ab"'), ('"ab"', '"a"'), ("[1]", "[1,1]"), ("[1,1]", "[1]"), ('{"a":1}', '{"a":1,"b":1}'),
        ('{"a":1,"b":1}', '{"a":1}'), ('{"a":1}', '{"a":1,"a":2}'), ("9007199254740993", "9007199254740992"),
        ('"\\ud83d"', '"\\ude00"'), ('""', '"a"'),
    ],
)  # fmt: skip
def test_what_is_not(one: str, other: str) -> None:
    before = start(Places({"uniqueItems": True}).start)
    assert follow(before, f"[{one},{other} ,".encode()) is not None


def test_what_is_left_is_drawn_from_as_if_it_were_all() -> None:
    """Same seeds, same chances: what would be a duplicate is no part of them."""
    three = {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True}
    steering = GRAMMARS.steering(pb.Grammar(json_schema=json.dumps(three), json_whitespace=""))
    digits = [TOKENIZER(text, add_special_tokens=False)["input_ids"][0] for text in "123"]
    for text in ("[", "1", ","):
        steering.accept(TOKENIZER(text, add_special_tokens=False)["input_ids"][0])
    logits = torch.full((1, 4096), -50.0)
    logits[0, digits] = torch.tensor([9.0, 1.0, 2.0])
    params = SamplingParams(seed=3, temperature=1.0)
    found = draw(logits, [Sampler(params, 3, (), steering)])[0]
    assert isinstance(found, Drawn)
    assert found.token in digits[1:]
    want = torch.log_softmax(torch.tensor([1.0, 2.0]), -1)
    assert dict(found.top) == pytest.approx({digits[2]: float(want[1]), digits[1]: float(want[0])}, abs=1e-4)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 3}, "with 3 items at least, and so many"),
        ({"enum": [[1, 1]]}, "an enum or a const of arrays"),
        ({"type": "array", "prefixItems": [{"type": "null"}], "minItems": 2}, "depends on its place"),
        ({"type": "array", "items": {"$ref": "#/$defs/none"}}, "none"),
    ],
)
def test_what_cannot_be_promised_is_refused(schema: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        steering_of({**schema, "uniqueItems": True})


def _each_twice(levels: int) -> dict[str, Any]:
    """Each level refers to the next one twice."""
    named = {str(i): {"anyOf": [{"$ref": f"#/$defs/{i + 1}"}, {"$ref": f"#/$defs/{i + 1}"}]} for i in range(levels)}
    return {"$defs": {**named, str(levels): {"type": "integer"}}, "type": "array", "uniqueItems": True,
            "items": {"$ref": "#/$defs/0"}, "minItems": 2}  # fmt: skip


_TREE = {
    "$defs": {"node": {
        "type": "object", "required": ["a"], "additionalProperties": False,
        "properties": {"a": {"enum": ["a", "b"]}, **{side: {"$ref": "#/$defs/node"} for side in ("b", "c", "d")}},
    }},
    "type": "array", "items": {"$ref": "#/$defs/node"}, "uniqueItems": True, "minItems": 1,
}  # fmt: skip


@pytest.mark.parametrize("schema", [_TREE, {**_TREE, "minItems": 2}, _each_twice(12), _each_twice(50)])
def test_what_refers_to_itself_is_counted_once(schema: dict[str, Any]) -> None:
    for seed in range(4):
        text = answer(steering_of(schema), seed)
        if text is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("levels", [4, 40])
def test_sets_of_alternatives_beyond_number_are_refused(levels: int) -> None:
    """Which of them hold depends on the last names of the path, so that there are as many places as ways."""
    steps = {str(i): {"type": "object", "properties": {key: {"$ref": f"#/$defs/{i + 1}"} for key in "ab"}}
             for i in range(1, levels)}  # fmt: skip
    either = {"anyOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}]}
    first = {"type": "object", "properties": {"a": either, "b": {"$ref": "#/$defs/0"}}}
    last = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {"$defs": {"0": first, **steps, str(levels): last}, "$ref": "#/$defs/0"}
    if levels < 10:
        assert steering_of(schema)
    else:
        with pytest.raises(InvalidRequest, match="uniqueItems beside too many alternatives that hold together"):
            steering_of(schema)
