"""Values between tags, as Qwen3-Coder writes them: kept to their schemas, read as they were written."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.requests import to_request

from inference_svc.chat_template.chat_template import ChatTemplate
from inference_svc.structured_output.grammar_state import GrammarState
from inference_svc.tool_calls.qwen3_coder_arguments import json_types
from inference_svc.tool_calls.tool_call_parser import ToolCallParser
from tests.inference_svc.chat_template.test_chat_template import HISTORY, chat_template_for
from tests.inference_svc.tool_calls.test_strict import decoded, go_on, spell

DAYS = {"days": {"type": "array", "items": {"enum": ["mon", "tue", "wed"]}, "minItems": 3, "maxItems": 3}}


def followed(made: ChatTemplate, request: pb.GenerateRequest) -> tuple[GrammarState, ToolCallParser]:
    """Return the grammar of a request's calls, and their parser."""
    steering, parser = made.grammar_state(request), made.parser(request)
    assert steering is not None
    assert parser is not None
    return steering, parser


def test_text_that_looks_like_an_argument_is_text() -> None:
    """What stands outside of calls, in values, or in calls of others is no argument of the function."""
    made = chat_template_for("qwen3_coder")
    tools = [
        {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": DAYS}}},
        {"type": "function", "function": {"name": "g", "strict": True, "parameters": {
            "properties": {"note": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
        }}},
    ]  # fmt: skip
    request = to_request(HISTORY[:1], tools=tools)
    quoted = "<function=f>\n<parameter=days>\nnothing"
    call = f"<function=g>\n<parameter=note>\n{quoted}".replace("\n<parameter=days", " <parameter=days")
    given = '<function=f>\n<parameter=days>\n["mon", "tue", "wed"]\n</parameter>\n</function>'
    text = (
        "I write\n<parameter=days>\nsuch lines.\n"
        f"{call}\n</parameter>\n<parameter=days>\n[1, 1]\n</parameter>\n</function>\nand\n<parameter=days>\n[1, 1, "
        f"or\n{given}\nand\n<parameter=days>\n[1, 1, x\n{given}"
    )
    steering, parser = followed(made, request)
    tokens = spell(made, steering, text)
    deltas = [*parser.feed(decoded(made, tokens)), *parser.finish()]
    calls = {d.index: d.name for d in deltas if d.name}
    assert list(calls.values()) == ["g", "f", "f"]
    assert json.loads("".join(d.arguments for d in deltas if d.index == 0))["days"] == [1, 1]


VALUES = {
    "pattern": {"type": "string", "pattern": "^x(?s:.)*$", "minLength": 4},
    "least": {"type": "string", "minLength": 4, "maxLength": 9},
    "line": {"type": "string", "pattern": "^x\n$"},
    "list": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
    "any": {},
}


ALLOWED = {("pattern", "xabc"), ("least", "xabc"), ("any", "<parameter=any>"), ("list", '["</parameter>"]')}


@pytest.mark.parametrize("key", sorted(VALUES))
@pytest.mark.parametrize(
    "value",
    ["abc\n", "x", "xabc", "x\n<parameter=any>\n", "x\n</function>", "x </parameter> y", '["</parameter>"]', "x\n",
     "x\n\n", "<parameter=any>", '["\\"</parameter>", "\n</function>"]', "x<parameter", "\n\nx\n\n"],
)  # fmt: skip
@pytest.mark.parametrize("end", ["\n</parameter>", "</parameter>"])
def test_what_may_be_written_is_read_as_it_was_written(key: str, value: str, end: str) -> None:
    """Or it may not be written."""
    made = chat_template_for("qwen3_coder")
    schema = {"type": "object", "properties": {key: VALUES[key]}, "required": [key]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    request = to_request(HISTORY[:1], tools=tools)
    steering, parser = followed(made, request)
    text = f"<function=f>\n<parameter={key}>\n{value}{end}\n</function>"
    tokens: list[int] = made._tokenizer(text, add_special_tokens=False)["input_ids"]
    for token in tokens:
        if not np.unpackbits(steering.mask(), bitorder="little")[token]:
            assert (key, value) not in ALLOWED or end[0] != "\n"
            return
        steering.accept(token)
    deltas = [*parser.feed(text), *parser.finish()]
    (found,) = json.loads("".join(d.arguments for d in deltas)).values()
    jsonschema.validate(found, VALUES[key])
    # Without a line's end of its own, the tag takes the text's.
    assert found == (
        json.loads(value) if key == "list" else f"{value}{end}".removesuffix("\n</parameter>")[: len(value)]
    )
    assert not "".join(d.text for d in deltas)


@pytest.mark.parametrize("schema", [{"type": ["string", "null"]}, {"anyOf": [{"type": "string"}, {"type": "null"}]}])
@pytest.mark.parametrize("value", ['"quoted', '[a "b', '{"x', '"', '"x"', "null"])
def test_a_string_or_null_ends_at_its_tag_whatever_quotes_it_has(schema: Any, value: str) -> None:
    made = chat_template_for("qwen3_coder")
    parameters = {"type": "object", "properties": {"q": schema, "n": {"type": "integer"}}, "required": ["q", "n"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    request = to_request(HISTORY[:1], tools=tools)
    steering, parser = followed(made, request)
    call = f"<function=f>\n<parameter=q>\n{value}\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>"
    deltas = parser.feed(decoded(made, spell(made, steering, call)))
    wanted = {"q": None if value == "null" else value, "n": 3}
    assert json.loads("".join(d.arguments for d in deltas)) == wanted


def test_strings_between_tags_are_as_their_schema_has_them() -> None:
    made = chat_template_for("qwen3_coder")
    properties = {
        "day": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[a-z]{2}/[0-9]$"},
        "kind": {"enum": ["a b", "c"]},
        "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "where": {"$ref": "#/$defs/place"},
    }
    schema = {
        "type": "object", "properties": properties, "required": list(properties),
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer", "maximum": 9, "minimum": 0}},
                            "required": ["x"], "additionalProperties": False}},
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    request = to_request(HISTORY[:1], tools=tools, tool_choice="required", parallel_tool_calls=False)
    for seed in range(4):
        steering, parser = followed(made, request)
        text = go_on(made, steering, [], "</tool_call>", seed)
        deltas = parser.feed(text)
        jsonschema.validate(json.loads("".join(delta.arguments for delta in deltas)), schema)


def test_types_that_refer_to_each_other_are_asked_once() -> None:
    several = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}] * 20
    named = {"a": {"anyOf": several}, "b": {"anyOf": [*several, {"type": "string"}]}}
    assert json_types({"$ref": "#/$defs/a"}, {"$defs": named}) == {"string"}
