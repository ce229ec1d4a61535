"""Chat template and tool calls with the built-in model's tokenizer: prompts, and answers that must call."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from kvsidecar.errors import InvalidRequest, UnsupportedOption
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.requests import to_prompt, to_request
from tokenizers import AddedToken

from inference_svc.chat_template.chat_template import ChatTemplate
from inference_svc.structured_output.grammar_compiler import GrammarCompiler
from inference_svc.tool_calls.tool_call_format import format_of
from tests.inference_svc.sequence.test_detokenizer import END, TOKENIZER
from tests.inference_svc.walking import walk

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Tells it.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
# Each with what tells its family's templates from the others', and what it writes of tools, calls and results.
TEMPLATES = {path.stem: path.read_text().rstrip() for path in (Path(__file__).parent / "templates").glob("*.jinja")}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "how is it?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_0123456789abc",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Oslo", "days": 2}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_0123456789abc", "content": "dry"},
]


def chat_template_for(dialect: str, *special: str) -> ChatTemplate:
    own = copy.deepcopy(TOKENIZER)
    own.chat_template = TEMPLATES[dialect]
    if any(special):
        own.add_special_tokens({"extra_special_tokens": list(special)})
    return ChatTemplate("a model", own, GrammarCompiler(own, 4096, END))


def chat(*messages: dict[str, Any], tools: list[Any] | None = None) -> pb.Chat:
    return to_prompt(messages, TOOLS if tools is None else tools).chat


def test_a_templates_text_says_its_dialect() -> None:
    for dialect, template in TEMPLATES.items():
        assert format_of(template) == dialect
    assert format_of(None) == "json"


def test_calls_and_results_are_written_by_the_template() -> None:
    text = chat_template_for("hermes").render(chat(*HISTORY), True)
    assert text.startswith('<tools>{"type": "function", "function": {"name": "get_weather", "description": "Tells it."')
    assert text.endswith(
        '[assistant]<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
        "[tool]dry[assistant]"
    )
    assert '{"city": "Oslo", "days": 2}[tool]dry' in chat_template_for("llama3_json").render(chat(*HISTORY), True)


def test_mistrals_ids_have_nine_letters() -> None:
    assert chat_template_for("mistral").render(chat(*HISTORY), True).endswith("[TOOL_CALLS]456789abcdry456789abc")


def test_arguments_that_were_cut_off_are_written_as_they_are() -> None:
    cut = copy.deepcopy(HISTORY)
    cut[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Os'
    assert '"{\\"city\\": \\"Os"' in chat_template_for("hermes").render(chat(*cut), True)


def test_a_template_without_tools_gets_them_described() -> None:
    plain = chat_template_for("json")
    text = plain.render(
        chat({"role": "system", "content": "Be kind."}, *HISTORY, {"role": "user", "content": "So?"}), True
    )
    assert text.startswith("[system]Be kind.\n\nYou can call functions.")
    assert '{"name": "now", "description": "", "parameters": {"type": "object"' in text
    assert text.endswith(
        '[user]how is it?[assistant]{"tool_calls": [{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}]}'
        "[user]Result of get_weather: dry\n\nSo?"
    )
    assert plain.render(chat(*HISTORY[:1], tools=[]), True) == "[user]how is it?", (
        "nothing is added where none are used"
    )


def test_a_template_that_knows_no_system_gets_them_from_the_user() -> None:
    plain = chat_template_for("json")
    plain._tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATES["json"]
    )
    text = plain.render(chat(*HISTORY[:1]), True)
    assert text.startswith("[user]You can call functions.")
    assert text.endswith("\n\nhow is it?")
    with pytest.raises(InvalidRequest, match="no system"):
        plain.render(chat({"role": "system", "content": "x"}, *HISTORY[:1]), True)


def answer(made: ChatTemplate, request: pb.GenerateRequest, seed: int) -> str:
    """The text of an answer of a model that draws any token that it may."""
    steering = made.grammar_state(request)
    assert steering is not None
    tokens = [token for token in walk(steering, seed) if token not in END]
    return str(made._tokenizer.decode(tokens, skip_special_tokens=not made.shows_special(request)))


@pytest.mark.parametrize(
    ("dialect", "special"),
    [("hermes", ""), ("hermes", "<tool_call>"), ("llama3_json", ""), ("mistral", ""), ("mistral", "[TOOL_CALLS]"),
     ("qwen3_coder", ""), ("qwen3_coder", "<tool_call>"), ("json", "")],
)  # fmt: skip
@pytest.mark.parametrize("single", [True, False])
def test_a_call_that_is_demanded_is_right_whatever_is_drawn(dialect: str, special: str, single: bool) -> None:
    made = chat_template_for(dialect, special)
    request = to_request(HISTORY[:1], tools=TOOLS, tool_choice="required", parallel_tool_calls=not single)
    for seed in range(6):
        text = answer(made, request, seed)
        parser = made.parser(request)
        assert parser is not None
        deltas = parser.feed(text) + parser.finish()
        assert not any(delta.text for delta in deltas)
        names = [delta.name for delta in deltas if delta.name]
        assert 1 <= len(names) <= (1 if single else 16)
        for i, name in enumerate(names):
            arguments = json.loads("".join(d.arguments for d in deltas if d.index == i))
            if name == "now":
                assert arguments == {}
            else:
                jsonschema.validate(arguments, SCHEMA)


def test_one_that_is_named_is_the_only_one() -> None:
    made = chat_template_for("hermes")
    request = to_request(HISTORY[:1], tools=TOOLS, tool_choice="now")
    text = answer(made, request, 1)
    assert re.fullmatch(r'<tool_call>\n\{"name": "now", "arguments": \{\s*\}\}\n</tool_call>', text)


def test_markers_that_are_special_are_shown_to_the_parser_alone() -> None:
    made = chat_template_for("mistral", "[TOOL_CALLS]")
    assert made.shows_special(to_request(HISTORY[:1], tools=TOOLS))
    assert not made.shows_special(to_request(HISTORY[:1], tools=TOOLS, tool_choice="none"))
    assert not made.shows_special(to_request(HISTORY[:1]))


@pytest.mark.parametrize(
    ("dialect", "special", "text"),
    [
        ("mistral", "[TOOL_CALLS]", '[TOOL_CALLS][{"name": "now", "arguments": {}}]'),
        ("hermes", "<tool_call>", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    ],
)
def test_a_marker_that_only_the_tokenizers_file_calls_special_is_shown(dialect: str, special: str, text: str) -> None:
    """Mistral's tokenizers do not name their markers as special tokens: the call arrived as text."""
    own = copy.deepcopy(TOKENIZER)
    own.chat_template = TEMPLATES[dialect]
    own.backend_tokenizer.add_special_tokens([AddedToken(special, special=True, normalized=False)])
    assert special not in own.all_special_tokens
    made = ChatTemplate("a model", own, GrammarCompiler(own, 4096, END))
    request = to_request(HISTORY[:1], tools=TOOLS)
    shown = own.decode(own(text)["input_ids"], skip_special_tokens=not made.shows_special(request))
    parser = made.parser(request)
    assert parser is not None
    deltas = parser.feed(shown) + parser.finish()
    assert [delta.name for delta in deltas if delta.name] == ["now"]
    assert not any(delta.text for delta in deltas)


def test_names_in_messages_are_bounded() -> None:
    call = pb.ToolCall(id="a", name="x" * 300, arguments="{}")
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi"), pb.ChatMessage(role="assistant")])
    chat.messages[1].tool_calls.append(call)
    with pytest.raises(InvalidRequest, match="300 characters; at most 256"):
        chat_template_for("hermes").render(chat, True)


def test_half_a_character_in_a_call_that_comes_back_is_refused() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi"), pb.ChatMessage(role="assistant")])
    chat.messages[1].tool_calls.append(pb.ToolCall(id="a", name="f", arguments='{"a": "\\ud800"}'))
    with pytest.raises(InvalidRequest, match="surrogate"):
        chat_template_for("hermes").render(chat, True)


def test_a_tokenizer_that_grammars_cannot_read_is_said_to_who_sends_one() -> None:
    grammars = GrammarCompiler(object(), 4096, END)  # type: ignore[arg-type]
    grammars.warm_up()
    with pytest.raises(UnsupportedOption, match="grammars"):
        grammars.compile(pb.Grammar(regex="a"))
