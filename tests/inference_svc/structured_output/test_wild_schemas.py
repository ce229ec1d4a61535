"""JSON Schemas that people wrote for other purposes, against a model that draws any token that it may: what is served
gives valid JSON, and what cannot be served is refused with the reason. ``schemas/README.md`` says whose they are."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb
from referencing import Registry

from inference_svc.structured_output.grammar_compiler import GrammarCompiler
from inference_svc.structured_output.grammar_state import GrammarState
from inference_svc.structured_output.schema_cleanup import plain
from tests.inference_svc.sequence.test_detokenizer import END, TOKENIZER

GRAMMARS = GrammarCompiler(TOKENIZER, 4096, END)
WILD = [json.loads(line) for line in (Path(__file__).parent / "schemas" / "wild.jsonl").read_text().splitlines()]
# Of the 602; ``schemas/README.md`` has the same numbers.
SERVED = 516
REFUSED = {"uniqueItems": 70, "pattern": 11, "type": 3, "patternProperties": 1, "dependencies": 1}
# After so many tokens the model hurries: of what it may draw it draws what ends something.
_PATIENCE = 60
_TEXTS = [TOKENIZER.decode([token]) for token in range(len(TOKENIZER))]
_ENDING = np.array([text[:1] in ('"', "}", "]") for text in _TEXTS])
_STOPS = sorted(END)


def steering_of(schema: Any) -> GrammarState:
    return GRAMMARS.compile(pb.Grammar(json_schema=json.dumps(schema)))


def written(steering: GrammarState, seed: int, most: int = 4000) -> str:
    """One answer's text."""
    chance, tokens = random.Random(seed), list[int]()
    while not steering.complete:
        allowed = np.unpackbits(steering.mask(), bitorder="little")[: len(_TEXTS)].astype(bool)
        if len(tokens) >= _PATIENCE:
            ends = _STOPS if allowed[_STOPS].any() else np.flatnonzero(allowed & _ENDING)
            choices = ends if len(ends) else np.flatnonzero(allowed)
        else:
            choices = np.flatnonzero(allowed)
        tokens.append(int(choices[chance.randrange(len(choices))]))
        steering.accept(tokens[-1])
        assert len(tokens) < most
    return str(TOKENIZER.decode([token for token in tokens if token not in END]))


def refusal(schema: Any, seed: int) -> str:
    """The keyword for which a schema is refused; empty for one that is served, of which an answer is valid then."""
    try:
        steering = steering_of(schema)
    except InvalidRequest as error:
        named = re.match(r"the grammar cannot be served: .*?the (?:JSON schema )?keywords? '(\$?\w+)'", str(error))
        return named[1] if named else f"no keyword named: {error}"
    value = json.loads(written(steering, seed))
    schema = with_any_of(schema)
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    kind(schema, registry=Registry()).validate(value)
    return ""


def with_any_of(schema: Any) -> Any:
    """A schema in which several alternatives of ``oneOf`` may hold: that is what is promised."""
    if isinstance(schema, list):
        return [with_any_of(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {"anyOf" if key == "oneOf" else key: with_any_of(value) for key, value in schema.items()}


def test_served_schemas_give_valid_json_and_refusals_name_the_keyword() -> None:
    outcomes = Counter(refusal(one["schema"], i) for i, one in enumerate(WILD))
    assert outcomes.pop("") == SERVED
    assert outcomes == REFUSED
    assert SERVED + sum(REFUSED.values()) == len(WILD)


def test_what_goes_changes_nothing_and_names_and_values_stay() -> None:
    inner = {"type": "array", "items": {"type": "string", "format": "AWS::Role.Arn"}, "uniqueItems": False}
    value = {"format": "int64", "uniqueItems": False}
    schema = {
        "$schema": "https://json-schema.org/draft-07/schema",
        "properties": {"format": inner, "uniqueItems": {"const": value}, "day": {"format": "date"}},
        "enum": [value],
        "anyOf": [{"items": inner}, True],
        "$defs": {"x": inner},
        "examples": [value],
    }
    clean = {"type": "array", "items": {"type": "string"}}
    assert plain(schema) == {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"format": clean, "uniqueItems": {"const": value}, "day": {"format": "date"}},
        "enum": [value],
        "anyOf": [{"items": clean}, True],
        "$defs": {"x": clean},
        "examples": [value],
    }
    kept = {"items": {"uniqueItems": True}, "format": "iri", "not": {"uniqueItems": True}}
    assert plain(kept) == kept
    assert plain({"$schema": "https://cloud.example/provider.v1.json", "type": "null"}) == {"type": "null"}


def test_the_readme_has_the_numbers() -> None:
    told = (Path(__file__).parent / "schemas" / "README.md").read_text()
    assert f"Of the {len(WILD)}, {SERVED} are served" in told
    assert all(re.search(rf"^\| {count} \| `{keyword}`", told, re.MULTILINE) for keyword, count in REFUSED.items())


def test_whose_they_are_is_said() -> None:
    told = (Path(__file__).parent / "schemas" / "README.md").read_text()
    assert all(one["source"].split()[0] in told and one["licence"] in told for one in WILD)
