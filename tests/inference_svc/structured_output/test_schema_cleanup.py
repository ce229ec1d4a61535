"""JSON of schemas as programs send them, written by a model that draws any token that it may: always valid."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.structured_output.grammar_compiler import GrammarCompiler
from tests.inference_svc.sequence.test_detokenizer import END, TOKENIZER
from tests.inference_svc.walking import walk

GRAMMARS = GrammarCompiler(TOKENIZER, 4096, END)
NAME = {"type": "string", "minLength": 1, "maxLength": 8}
SCHEMAS: dict[str, Any] = {
    "a person, as pydantic writes it": {
        "$defs": {
            "Address": {
                "title": "Address",
                "type": "object",
                "properties": {"street": NAME, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
                "required": ["street", "zip"],
                "additionalProperties": False,
            }
        },
        "title": "Person",
        "type": "object",
        "properties": {
            "name": NAME,
            "age": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 150}, {"type": "null"}], "default": None},
            "address": {"$ref": "#/$defs/Address", "description": "Where they live."},
            "nicknames": {"type": "array", "items": NAME, "maxItems": 3},
        },
        "required": ["name", "age", "address"],
        "additionalProperties": False,
    },
    "a choice of shapes, told apart by a constant": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "minimum": 0, "maximum": 9}},
                "required": ["kind", "radius"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"kind": {"const": "square"}, "side": {"type": "integer", "enum": [1, 2, 3]}},
                "required": ["kind", "side"],
                "additionalProperties": False,
            },
        ]
    },
    "a date, an address of mail, an identifier": {
        "type": "object",
        "properties": {
            "day": {"type": "string", "format": "date"},
            "id": {"type": "string", "format": "uuid"},
            "done": {"type": "boolean"},
        },
        "required": ["day", "id", "done"],
        "additionalProperties": False,
    },
    "a list of fixed places": {
        "type": "array",
        "prefixItems": [{"enum": ["on", "off"]}, {"type": "integer", "minimum": -5, "maximum": 5}],
        "items": False,
        "minItems": 2,
    },
    "a tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer", "minimum": 0, "maximum": 9},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "maxItems": 2},
                },
                "required": ["v", "kids"],
                "additionalProperties": False,
            },
            "leaf": {"type": ["null", "boolean"]},
        },
        "$ref": "#/$defs/node",
    },
    "parts that must all hold": {
        "allOf": [
            {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"enum": [True, None, 3.5]}}, "required": ["b"]},
        ],
        "additionalProperties": False,
        "properties": {"a": {}, "b": {}},
    },
    "a plain value": {"enum": ["é\n\"quoted\"", 7, None, {"a": [1]}]},
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("spaced", [True, False])
def test_whatever_is_drawn_is_valid(name: str, spaced: bool) -> None:
    schema = SCHEMAS[name]
    grammar = pb.Grammar(json_schema=json.dumps(schema), json_whitespace=None if spaced else "")
    for seed in range(5):
        tokens = walk(GRAMMARS.compile(grammar), seed)
        text = TOKENIZER.decode([token for token in tokens if token not in END])
        jsonschema.validate(json.loads(text), schema)
        assert spaced or "\n" not in text
