"""Answers that call or are as a grammar says: every one is one of both, whatever is drawn."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.requests import to_request

from inference_svc.chat_template.chat_template import ChatTemplate
from inference_svc.structured_output.grammar_state import GrammarState
from inference_svc.tool_calls.tool_call_parser import ToolCallParser
from tests.inference_svc.chat_template.test_chat_template import HISTORY, SCHEMA, TOOLS, chat_template_for
from tests.inference_svc.sequence.test_detokenizer import END, TOKENIZER
from tests.inference_svc.tool_calls.test_tool_call_parser import FUNCTIONS
from tests.inference_svc.walking import walk

FORMS = [
    ("hermes", ""), ("hermes", "<tool_call>"), ("llama3_json", ""), ("mistral", ""), ("mistral", "[TOOL_CALLS]"),
    ("qwen3_coder", ""), ("qwen3_coder", "<tool_call>"), ("json", ""),
]  # fmt: skip
DAYS = {"type": "array", "items": {"enum": ["mon", "tue", "wed"]}, "minItems": 3, "maxItems": 3}
# Begins as calls do where they are objects.
LIKE_A_CALL = {
    "type": "object", "properties": {"name": {"type": "string"}, "tool_calls": DAYS},
    "required": ["tool_calls"], "additionalProperties": False,
}  # fmt: skip
TAGS: dict[str, Any] = {**SCHEMA, "properties": {**SCHEMA["properties"], "tags": {**DAYS, "minItems": 2}}}  # type: ignore[dict-item]
SETS = [{"type": "function", "function": {"name": "get_weather", "parameters": TAGS}}]
_FEW = np.array([bool(text) and set(text) <= set('monde[]{}", ') for text in map(TOKENIZER.decode, range(4096))])


def read(made: ChatTemplate, request: pb.GenerateRequest, text: str) -> tuple[str, list[tuple[str, str]]]:
    """The text of an answer, and names and arguments of its calls."""
    parser = made.parser(request)
    assert parser is not None
    deltas = [*parser.feed(text), *parser.finish()]
    calls = {d.index: d.name for d in deltas if d.name}
    found = [(name, "".join(d.arguments for d in deltas if d.index == i)) for i, name in calls.items()]
    return "".join(d.text for d in deltas), found


def lazy(made: ChatTemplate, steering: GrammarState, seed: int) -> str | None:
    """An answer of a model that would rather repeat itself; None where it did not end in time."""
    chance, tokens = random.Random(seed), list[int]()
    while not steering.complete:
        allowed = np.unpackbits(steering.mask(), bitorder="little")[:4096].astype(bool)
        few = np.flatnonzero(allowed & _FEW)
        ids = few if len(few) and chance.random() < 0.95 else np.flatnonzero(allowed)
        tokens.append(int(ids[chance.randrange(len(ids))]))
        steering.accept(tokens[-1])
        if len(tokens) > 600:
            return None
    return str(made._tokenizer.decode([token for token in tokens if token not in END]))


@pytest.mark.parametrize(("dialect", "special"), FORMS)
@pytest.mark.parametrize("schema", [DAYS, LIKE_A_CALL])
def test_an_answer_is_valid_by_its_schema_or_calls(dialect: str, special: str, schema: dict[str, Any]) -> None:
    made = chat_template_for(dialect, special)
    request = to_request(HISTORY[:1], tools=SETS, json_schema=schema)
    ended = 0
    for seed in range(8):
        steering = made.grammar_state(request)
        assert steering is not None
        if (text := lazy(made, steering, seed)) is None:
            continue
        ended += 1
        said, calls = read(made, request, text)
        for name, arguments in calls:
            assert name == "get_weather"
            jsonschema.validate(json.loads(arguments), TAGS)
        if not calls:
            assert said == text
            jsonschema.validate(json.loads(said), schema)
    assert ended


@pytest.mark.parametrize(("dialect", "special"), FORMS)
def test_calls_and_answers_are_both_still_there(dialect: str, special: str) -> None:
    made = chat_template_for(dialect, special)
    call = {
        "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
        "llama3_json": '{"name": "now", "parameters": {}}',
        "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "json": '{"tool_calls": [{"name": "now", "arguments": {}}]}',
    }[dialect]
    request = to_request(HISTORY[:1], tools=TOOLS, json_schema=DAYS)
    for text, wanted in ((call, ("", [("now", "{}")])), ('["tue", "wed", "mon"]', ('["tue", "wed", "mon"]', []))):
        steering = made.grammar_state(request)
        assert steering is not None
        for token in made._tokenizer(text, add_special_tokens=False)["input_ids"]:
            steering.accept(token)
        assert np.unpackbits(steering.mask(), bitorder="little")[sorted(END)].any(), "it may end"
        assert read(made, request, text) == wanted


def test_where_one_ends_and_the_other_goes_on_both_may_be() -> None:
    made = chat_template_for("hermes")
    short, long = (made._grammars.compile(pb.Grammar(regex=regex)) for regex in ("ab", "abc"))
    a, b, c = (made._tokenizer(text, add_special_tokens=False)["input_ids"] for text in "abc")
    either = short.union(long)
    for token in (*a, *b):
        assert not either.complete
        either.accept(token)
    allowed = np.flatnonzero(np.unpackbits(either.mask(), bitorder="little")).tolist()
    assert set(allowed) == {*END, *c}
    either.accept(c[0])
    assert either.complete


def test_grammars_of_every_kind_go_with_tools() -> None:
    made = chat_template_for("hermes")
    for asked, allowed in (
        ({"grammar": 'start: "yes" | "no"'}, ("yes", "no")),
        ({"regex": "yes|no"}, ("yes", "no")),
        ({"choice": ["yes", "no"]}, ("yes", "no")),
    ):
        request = to_request(HISTORY[:1], tools=TOOLS[1:], **asked)  # type: ignore[arg-type]
        for seed in range(4):
            steering = made.grammar_state(request)
            assert steering is not None
            tokens = [token for token in walk(steering, seed) if token not in END]
            text, calls = read(made, request, str(made._tokenizer.decode(tokens)))
            assert (text in allowed and not calls) or (not text and {name for name, _ in calls} == {"now"})


def test_what_cannot_be_served_is_said_of_what_it_is() -> None:
    made = chat_template_for("hermes")
    for tools, schema, said, param in (
        (TOOLS, {"contains": {}}, "^the grammar cannot be served: .*contains", "grammar"),
        (TOOLS, {**DAYS, "uniqueItems": True}, "^the grammar cannot be served: .*'uniqueItems'", "grammar"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}], DAYS, "of these tools", "tools"),
    ):
        with pytest.raises(InvalidRequest, match=said) as caught:
            made.grammar_state(to_request(HISTORY[:1], tools=tools, json_schema=schema))
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("dialect", "quoted"),
    [
        ("hermes", "<tool_call>{'x'}</tool_call>"), ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}"), ("qwen3_coder", "<function=f></function>"),
        ("qwen3_coder", "<tool_call><function=f>\n</function></tool_call>"),
    ],
)  # fmt: skip
def test_an_answer_that_quotes_a_call_is_none(dialect: str, quoted: str) -> None:
    """Where it is a call or of a form, its beginning says which."""
    made = chat_template_for(dialect)
    request = to_request(HISTORY[:1], tools=TOOLS, json_schema={"type": "string"})
    text = f' "{quoted}" '
    assert read(made, request, text) == (text, [])
    if "'" not in quoted:
        assert read(made, request, f"\n{quoted}")[1], "at the beginning it is one"
    parser = ToolCallParser(dialect, FUNCTIONS, whole=True)
    deltas = [delta for character in text for delta in parser.feed(character)] + parser.finish()
    assert "".join(delta.text for delta in deltas) == text
