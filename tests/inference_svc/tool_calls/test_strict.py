"""Strict functions where the model decides whether to call: free text, and calls that keep to their schemas."""

from __future__ import annotations

import contextlib
import json
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.requests import to_request

from inference_svc.chat_template.chat_template import ChatTemplate
from inference_svc.sequence.detokenizer import ReasoningMarkers
from inference_svc.structured_output.grammar_state import GrammarState
from inference_svc.structured_output.schema_cleanup import plain
from inference_svc.tool_calls.qwen3_coder_arguments import parameter_rules
from inference_svc.tool_calls.tool_call_parser import ToolCallParser
from tests.inference_svc.chat_template.test_chat_template import HISTORY, SCHEMA, TOOLS, chat_template_for
from tests.inference_svc.sequence.test_detokenizer import END, TOKENIZER

STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]  # type: ignore[dict-item]
# Dialect, what is special in it, how a call begins behind text, and what ends it.
CASES = [
    ("hermes", "", "Let me see.\n<tool_call>", "</tool_call>"),
    ("hermes", "<tool_call>", "<tool_call>", "</tool_call>"),
    ("mistral", "", "So: [TOOL_CALLS]", "}]"),
    ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", "}]"),
    ("qwen3_coder", "", "Well.\n<tool_call>\n<function=", "</function>"),
    ("qwen3_coder", "<tool_call>", "<tool_call>\n<function=", "</function>"),
    ("llama3_json", "", '{"name": "', "}}"),
    ("json", "", '{"tool_calls": [', "}]}"),
]

# What is drawn more often, or strings would not end.
ENDING = np.array([i for i in range(len(TOKENIZER)) if TOKENIZER.decode([i])[:1] in ("}", "]", '"', "<", "\n")])


def asked(made: ChatTemplate, single: bool = False) -> tuple[pb.GenerateRequest, GrammarState]:
    request = to_request(HISTORY[:1], tools=STRICT, parallel_tool_calls=not single)
    steering = made.grammar_state(request)
    assert steering is not None
    return request, steering


def spell(made: ChatTemplate, steering: GrammarState, text: str) -> list[int]:
    """The tokens of a text, which are all allowed."""
    tokens: list[int] = made._tokenizer(text, add_special_tokens=False)["input_ids"]
    for token in tokens:
        steering.accept(token)
    return tokens


def decoded(made: ChatTemplate, tokens: list[int]) -> str:
    return str(made._tokenizer.decode([token for token in tokens if token not in END]))


def go_on(made: ChatTemplate, steering: GrammarState, tokens: list[int], end: str, seed: int) -> str:
    """What a model writes that draws any token that it may, until a text stands at the end."""
    chance, text = random.Random(seed), decoded(made, tokens)
    while not text.endswith(end) and not steering.complete:
        allowed = np.flatnonzero(np.unpackbits(steering.mask(), bitorder="little"))
        ends = np.intersect1d(allowed, ENDING)
        choices = ends if len(ends) and chance.random() < 0.3 else allowed
        tokens.append(int(choices[chance.randrange(len(choices))]))
        steering.accept(tokens[-1])
        text = decoded(made, tokens)
        assert len(tokens) < 2000
    return text


@pytest.mark.parametrize(("dialect", "special", "opening", "end"), CASES)
def test_a_call_that_has_begun_is_right_whatever_is_drawn(dialect: str, special: str, opening: str, end: str) -> None:
    made = chat_template_for(dialect, special)
    for seed in range(4):
        request, steering = asked(made)
        text = go_on(made, steering, spell(made, steering, opening), end, seed)
        parser = made.parser(request)
        assert parser is not None
        deltas = parser.feed(text)
        (name,) = [delta.name for delta in deltas if delta.name][:1]
        arguments = json.loads("".join(delta.arguments for delta in deltas if delta.index == 0))
        jsonschema.validate(arguments, SCHEMA if name == "get_weather" else {"type": "object", "maxProperties": 0})


@pytest.mark.parametrize(("dialect", "special"), [(dialect, special) for dialect, special, *_ in CASES])
def test_text_is_free_and_may_end_anywhere(dialect: str, special: str) -> None:
    made = chat_template_for(dialect, special)
    for text in (
        "",
        "Nothing to do: <tool>, {x} and [1].\n\nÜber 🦊",
        '{"answer": 1, "city": [2]}',
        "```json\n[1]\n```",
    ):
        request, steering = asked(made)
        spell(made, steering, text)
        assert np.unpackbits(steering.mask(), bitorder="little")[sorted(END)].any()
        parser = made.parser(request)
        assert parser is not None
        assert "".join(delta.text for delta in [*parser.feed(text), *parser.finish()]) == text


def test_other_special_tokens_may_stand_in_text() -> None:
    made = chat_template_for("hermes", "<tool_call>")
    made._tokenizer.add_special_tokens({"extra_special_tokens": ["<tool_call>", "<think>"]})
    made = ChatTemplate("a model", made._tokenizer, type(made._grammars)(made._tokenizer, 4096, END))
    _, steering = asked(made)
    spell(made, steering, "<think>so<think> it is <tool_call>\n")


def test_after_a_call_there_may_be_another_and_text() -> None:
    made = chat_template_for("hermes")
    _, steering = asked(made)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    spell(made, steering, f"First{call}\n{call} and done.")
    _, steering = asked(made, single=True)
    spell(made, steering, f"First{call} and done.")


def test_only_strict_functions_steer_and_what_they_cannot_keep_to_is_named() -> None:
    made = chat_template_for("hermes")
    assert made.grammar_state(to_request(HISTORY[:1], tools=TOOLS)) is None
    assert made.grammar_state(to_request(HISTORY[:1], tools=STRICT, tool_choice="none")) is None
    bad = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]
    with pytest.raises(InvalidRequest, match="'not'") as caught:
        made.grammar_state(to_request(HISTORY[:1], tools=bad))
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"type": "object", "anyOf": [{"required": ["a"]}]}, "'anyOf' of all arguments"),
        ({"properties": {"a": {"type": "string", "format": "iri"}}}, "the format 'iri' of the argument 'a'"),
        ({"properties": {"a": {"type": "string", "contentEncoding": "x"}}}, "'contentEncoding' of the argument 'a'"),
        ({"properties": {"a>b": {}}}, "an argument called 'a>b'"),
        ({"type": "array"}, "arguments that are no object"),
        ({"properties": {"a": {"enum": ["b", "c</parameter>"]}}}, "a value of the argument 'a' that has the text"),
        ({"properties": {"a": {"const": "b\n<parameter=c>"}}}, "a value of the argument 'a' that has the text"),
        ({"properties": {"a": {"type": "string", "anyOf": [{"minLength": 1}]}}}, "several schemas of the string 'a'"),
        ({"properties": {"a": {"not": {"type": "string"}}}}, "'not' of the argument 'a'"),
    ],
)
def test_what_text_between_tags_cannot_keep_to_is_named(parameters: dict[str, object], said: str) -> None:
    made = chat_template_for("qwen3_coder")
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(InvalidRequest, match=said):
        made.grammar_state(to_request(HISTORY[:1], tools=tools, tool_choice="required"))


KEYWORDS = "type properties required enum const anyOf allOf $ref format pattern minLength maxLength $defs items".split()
VALUES = [
    "string",
    "null",
    ["string", "null"],
    ["a", 1, None],
    "iri",
    "date",
    "^a/b$",
    "(",
    "a\nb",
    "#",
    "#/$defs/a",
    3,
    True,
]
schemas = st.recursive(
    st.sampled_from(VALUES),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["a", "b"]), schemas, max_size=2) | schemas, schemas)
@example({"a": {"type": "string", "anyOf": 3}}, {})
@example({"a": {"enum": 3}}, {})
def test_no_schema_is_more_than_refused(properties: object, shared: object) -> None:
    schema = {"type": "object", "properties": properties, "$defs": shared}
    plain(schema)
    with contextlib.suppress(InvalidRequest):
        parameter_rules(0, "f", schema)
    parser = ToolCallParser("qwen3_coder", {"f": schema})
    text = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
    arguments = "".join(delta.arguments for delta in [*parser.feed(text), *parser.finish()])
    assert json.loads(arguments)["a"] in (1, "1")


def test_a_call_is_kept_to_behind_special_tokens_and_after_another() -> None:
    made = chat_template_for("qwen3_coder", "<tool_call>")
    for text in ("<function=", "Hm <function=", "<tool_call> <function=", "a<tool_call>b<tool_call>\n<function=",
                 "<tool_call>\n<function=now>\n</function>\n</tool_call>\nand <function="):  # fmt: skip
        _, steering = asked(made)
        spell(made, steering, text)
        allowed = np.flatnonzero(np.unpackbits(steering.mask(), bitorder="little")).tolist()
        assert {decoded(made, [token])[:1] for token in allowed} == {"g", "n"}, "get_weather or now"


@pytest.mark.parametrize("dialect", ["hermes", "mistral", "llama3_json", "json", "qwen3_coder"])
@pytest.mark.parametrize("must", [True, False])
def test_arguments_with_unique_items_are_refused_by_name(dialect: str, must: bool) -> None:
    made = chat_template_for(dialect)
    days = {"type": "array", "items": {"enum": ["mon", "tue"]}, "uniqueItems": True}
    parameters = {"type": "object", "properties": {"days": days}, "required": ["days"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}]
    more = {"tool_choice": "required"} if must else {}
    with pytest.raises(InvalidRequest, match="the JSON schema keyword 'uniqueItems' is not supported") as caught:
        made.grammar_state(to_request(HISTORY[:1], tools=tools, **more))  # type: ignore[arg-type]
    assert caught.value.param == "tools"


@pytest.mark.parametrize("special", [(), ("<think>",), ("</think>",), ("<think>", "</think>")])
@pytest.mark.parametrize("dialect", ["json", "llama3_json"])
@pytest.mark.parametrize(
    ("begun", "text"),
    [(True, "Let <think> {x} <|user|></think>\n\n"), (False, "\n<think>so</thin</think>\n"), (False, "<think></think>"),
     (False, "\n")],
)  # fmt: skip
def test_a_call_behind_reasoning_is_right_whatever_is_drawn(
    dialect: str, begun: bool, text: str, special: tuple[str, ...]
) -> None:
    """The reasoning counted as the answer's text, so nothing kept the call behind it to its function's schema."""
    made = chat_template_for(dialect, *special)
    opening, end = next(case[2:] for case in CASES if case[0] == dialect)
    request = to_request(HISTORY[:1], tools=STRICT)
    steering = made.grammar_state(request, ReasoningMarkers("" if begun else "<think>", "</think>"))
    assert steering is not None
    spell(made, steering, text)
    answer = go_on(made, steering, spell(made, steering, opening), end, 0)
    parser = made.parser(request)
    assert parser is not None
    deltas = parser.feed(answer)
    name = next(delta.name for delta in deltas if delta.name)
    arguments = json.loads("".join(delta.arguments for delta in deltas if delta.index == 0))
    jsonschema.validate(arguments, SCHEMA if name == "get_weather" else {"type": "object", "maxProperties": 0})


@pytest.mark.parametrize("special", [(), ("<think>",), ("</think>",), ("<think>", "</think>")])
@pytest.mark.parametrize("dialect", ["json", "llama3_json"])
@pytest.mark.parametrize(
    ("begun", "text"),
    [(True, ""), (True, '{"name": "x", "tool_calls": {</thin'), (True, '</think> {"a": 1} <think>'),
     (True, "a</think>"), (False, "<thin"), (False, "\n<think> <think>"), (False, "so <think>{</think>"),
     (False, '\n{"city": 1}'), (False, '<think></think>{"a"</think>')],
)  # fmt: skip
def test_text_behind_reasoning_is_free(dialect: str, begun: bool, text: str, special: tuple[str, ...]) -> None:
    made = chat_template_for(dialect, *special)
    reasoning = ReasoningMarkers("" if begun else "<think>", "</think>")
    steering = made.grammar_state(to_request(HISTORY[:1], tools=STRICT), reasoning)
    assert steering is not None
    spell(made, steering, text)
    assert np.unpackbits(steering.mask(), bitorder="little")[sorted(END)].any()


@pytest.mark.parametrize(("dialect", "special", "opening", "end"), CASES)
def test_a_schema_in_another_script_has_its_own_size(dialect: str, special: str, opening: str, end: str) -> None:
    """In escapes, this schema has more than the 64 KiB of a grammar."""
    cities = ["Осло", "東京", "🦊"]
    place = {"description": "г" * 14_000, "type": "object", "properties": {"город": {"enum": cities}},
             "required": ["город"], "additionalProperties": False}  # fmt: skip
    schema = {"type": "object", "properties": {"место": place, "имя": {"enum": cities}},
              "required": ["место", "имя"], "additionalProperties": False}  # fmt: skip
    made, function = chat_template_for(dialect, special), {"name": "look", "parameters": schema, "strict": True}
    request = to_request(HISTORY[:1], tools=[{"type": "function", "function": function}])
    steering = made.grammar_state(request)
    assert steering is not None
    answer = go_on(made, steering, spell(made, steering, opening), end, 0)
    parser = made.parser(request)
    assert parser is not None
    arguments = json.loads("".join(delta.arguments for delta in parser.feed(answer) if delta.index == 0))
    jsonschema.validate(arguments, schema)
    assert "\u0433" in made.render(request.prompt.chat, True)


def test_a_lone_surrogate_in_a_schema_is_refused() -> None:
    request = to_request(HISTORY[:1], tools=STRICT)
    request.prompt.chat.tools[0].parameters = '{"properties": {"a": {"enum": ["\\ud800"]}}}'
    with pytest.raises(InvalidRequest, match="the grammar of these tools cannot be served: it has a lone surrogate"):
        chat_template_for("json").grammar_state(request)
