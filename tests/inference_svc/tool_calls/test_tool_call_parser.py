"""Calls out of text: each dialect, and the same whatever the pieces in which the text came."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.tool_calls.qwen3_coder_arguments import json_types
from inference_svc.tool_calls.tool_call_parser import ToolCallParser

KINDS = {"a": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": ["object", "null"]}}
KINDS |= {"b": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "r": {"$ref": "#/$defs/list"}}
SCHEMA = {"type": "object", "properties": KINDS, "$defs": {"list": {"type": "array"}}}
FUNCTIONS: dict[str, Any] = {"f": SCHEMA, "g": {}, "get_weather": {}}
NAMES = frozenset(FUNCTIONS)
DIALECTS = ["hermes", "llama3_json", "mistral", "qwen3_coder", "json"]
Read = tuple[str, list[tuple[str, str]]]


def read(dialect: str, pieces: list[str], single: bool = False) -> Read:
    """The text, and names and arguments of the calls."""
    parser = ToolCallParser(dialect, FUNCTIONS, single)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    calls: list[list[str]] = []
    for delta in deltas:
        if delta.name:
            assert delta.id
            assert delta.index == len(calls), "a call begins with its name, and calls are counted"
            calls.append([delta.name, delta.arguments])
        elif delta.index is not None:
            calls[delta.index][1] += delta.arguments
    return "".join(delta.text for delta in deltas), [(name, arguments) for name, arguments in calls]


WRITTEN: list[tuple[str, str, Read]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', ("", [("f", '{"x": 1}')])),
    (
        "hermes",
        'Let me see.\n<tool_call>{"name": "f", "arguments": {"a": "}]{\\"", "b": [1, {}]}}</tool_call>\n'
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>\n',
        ("Let me see.", [("f", '{"a": "}]{\\"", "b": [1, {}]}'), ("other", "{}")]),
    ),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call> done', (" done", [("f", '{"x": 1}')])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', ("", [("f", '{"x": 1}')])),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    ("hermes", "a <tool and a <tool_call> that is none  ", ("a <tool and a <tool_call> that is none  ", [])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "cut', ("", [("f", '{"x": "cut')])),
    ("hermes", '<tool_call>{"name": "cu', ('<tool_call>{"name": "cu', [])),
    ("hermes", '{"name": "f", "arguments": {}}', ('{"name": "f", "arguments": {}}', [])),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}, {"name": "g", "arguments": {}}]',
        ("", [("f", '{"x": 1}'), ("g", "{}")]),
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{"y": [2]}', ("", [("f", '{"x": 1}'), ("g", '{"y": [2]}')])),
    ("mistral", 'So: [TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"x": 1}', ("So:", [("f", '{"x": 1}')])),
    ("mistral", "[TOOL_CALLS] what now", ("[TOOL_CALLS] what now", [])),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
        ("", [("f", '{"x": 1}'), ("g", "{}")]),
    ),
    ("llama3_json", '\n\n{"type": "function", "name": "f", "parameters": {}}', ("", [("f", "{}")])),
    ("llama3_json", '{"name": "Ada", "parameters": {"x": 1}} is', ('{"name": "Ada", "parameters": {"x": 1}} is', [])),
    ("llama3_json", 'Hello {"name": "f", "parameters": {}}', ('Hello {"name": "f", "parameters": {}}', [])),
    (
        "json",
        '{"tool_calls": [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": null}]}',
        ("", [("f", '{"x": 1}'), ("g", "{}")]),
    ),
    ("json", '```json\n{"name": "f", "arguments": {"x": 1}}\n```', ("", [("f", '{"x": 1}')])),
    ("json", "[{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"g\"}] ok", (" ok", [("f", "{}"), ("g", "{}")])),
    ("json", '{"title": "f", "name": "f"}', ('{"title": "f", "name": "f"}', [])),
    ("json", '{"tool_calls": []}', ('{"tool_calls": []}', [])),
    (
        "qwen3_coder",
        "Well.\n<tool_call>\n<function=f>\n<parameter=a>\nOslo \"x\"\n\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
        "<parameter=b>\nTrue\n</parameter>\n<parameter=o>\nNone\n</parameter>\n<parameter=r>\n[1, {}]\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        ("Well.", [("f", '{"a": "Oslo \\"x\\"\\n", "n": 12, "b": true, "o": null, "r": [1, {}]}'), ("g", "{}")]),
    ),
    (
        "qwen3_coder",
        "<function=f><parameter=a>as it <is>, </p></parameter><parameter=n>twelve</parameter></function> end",
        (" end", [("f", '{"a": "as it <is>, </p>", "n": "twelve"}')]),
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f>\n<parameter=a>\nforgotten\n<parameter=n>\n3\n</function>\n</tool_call>",
        ("", [("f", '{"a": "forgotten", "n": 3}')]),
    ),
    ("qwen3_coder", "<function=f>\n<parameter=a>\ncut o", ("", [("f", '{"a": "cut o')])),
    ("qwen3_coder", "<function=f>\n<parameter=n>\n1", ("", [("f", '{"n": ')])),
    ("qwen3_coder", "a <tool_call> that is none", ("a <tool_call> that is none", [])),
    ("qwen3_coder", "<function=a b></function>", ("<function=a b></function>", [])),
    ("qwen3_coder", "<function=f", ("<function=f", [])),
    ("qwen3_coder", "<function=f>\nof course", ("of course", [("f", "{}")])),
    ("qwen3_coder", "<function=f>\n<a and no end", ("<a and no end", [("f", "{}")])),
    ("qwen3_coder", "<function=f>\n<param", ("", [("f", "")])),
    (
        "qwen3_coder",
        '<function=f>\n<parameter=r>\n["</parameter>", "\\"</parameter>"]\n</parameter>\n</function> so',
        (" so", [("f", '{"r": ["</parameter>", "\\"</parameter>"]}')]),
    ),
    (
        "qwen3_coder",
        '<function=f>\n<parameter=r>\n["\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function> so',
        (" so", [("f", '{"r": "[\\"", "n": 3}')]),
    ),
    ("qwen3_coder", '<function=f>\n<parameter=r>\n["</parameter>', ("", [("f", '{"r": "[\\""}')])),
    ("qwen3_coder", f"<function=f><parameter=n>{'9' * 5000}</parameter></function>",
     ("", [("f", f'{{"n": {"9" * 5000}}}')])),
    ("hermes", '<tool_call>{"name": "f"} and then', (" and then", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f"}}\n</tool_c', ("", [("f", "{}")])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}\n</tool_call> ok', (" ok", [("f", '{"x": 1}')])),
    ("hermes", '<tool_call>{"name": "f"<tool_call>{"name": "g"}</tool_call>', ("", [("f", ""), ("g", "{}")])),
    ("hermes", '<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}\n', ("", [("f", "{}"), ("g", "{}")])),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>, <tool_call>{"name": "g"}', (",", [("f", "{}"), ("g", "{}")])),
    ("llama3_json", '{"name": "f", "parameters": {}}; no more', ("; no more", [("f", "{}")])),
    ("llama3_json", '{"name": "f", "parameters": {}} ; ', ("", [("f", "{}")])),
    ("mistral", "[TOOL_CALLS][ ] none", ("[TOOL_CALLS][ ] none", [])),
    ("json", "[]", ("[]", [])),
    ("mistral", '[TOOL_CALLS]{"name": "f"} then', (" then", [("f", "{}")])),
    ("json", " \n", (" \n", [])),
    ("json", "``", ("``", [])),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "wanted"), WRITTEN)
def test_it_is_read_as_it_was_meant(dialect: str, text: str, wanted: Read) -> None:
    assert read(dialect, [text]) == wanted
    assert read(dialect, list(text)) == wanted


def test_one_call_only_where_only_one_is_wanted() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert read("hermes", [text], single=True) == ("", [("f", "{}")])


def test_arguments_are_passed_on_as_they_are_written_and_text_at_once() -> None:
    parser = ToolCallParser("hermes", FUNCTIONS)
    assert [d.text for d in parser.feed("Well")] == ["Well"]
    parser.feed('<tool_call>{"name": "f", "arguments": ')
    assert [d.arguments for d in parser.feed('{"x": 1')] == ['{"x": 1']
    plain = ToolCallParser("json", FUNCTIONS)
    assert [d.text for d in plain.feed('{"title": 1')] == ['{"title": 1'], "no call begins so: nothing is held back"


def test_ids_differ_and_mistrals_are_as_its_templates_want_them() -> None:
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]'
    ids = [delta.id for delta in ToolCallParser("mistral", FUNCTIONS).feed(text) if delta.id]
    assert len(set(ids)) == 2
    assert all(len(name) == 9 and name.isalnum() for name in ids)


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
calls = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=5), values, max_size=3)),
    min_size=1, max_size=3,
)  # fmt: skip

bare = st.dictionaries(
    st.sampled_from(["x", "two words", "é"]), st.text(st.sampled_from("a\n <>/=\\\"{}é🦊"), max_size=20).filter(
        lambda text: not re.search(r"</parameter>|\n<parameter=|\n</function>", f"{text}\n")
    ), max_size=3,
)  # fmt: skip


def tagged(name: str, arguments: dict[str, Any], indent: int | None) -> str:
    """As the schema of nothing has it: all values are text."""
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def written(dialect: str, calls: list[tuple[str, Any]], indent: int | None) -> str:
    key = "parameters" if dialect == "llama3_json" else "arguments"
    each = [json.dumps({"name": name, key: arguments}, indent=indent) for name, arguments in calls]
    if dialect == "hermes":
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in each)
    if dialect == "mistral":
        return f"[TOOL_CALLS][{', '.join(each)}]"
    if dialect == "qwen3_coder":
        return "\n".join(tagged(name, arguments, indent) for name, arguments in calls)
    return "; ".join(each) if dialect == "llama3_json" else f'{{"tool_calls": [{", ".join(each)}]}}'


@st.composite
def cut(draw: st.DrawFn, text: str) -> list[str]:
    ends = sorted(draw(st.sets(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize("dialect", DIALECTS)
@given(data=st.data(), wanted=calls, indent=st.sampled_from([None, 2]))
def test_what_was_called_comes_out_whatever_the_pieces(
    dialect: str, data: st.DataObject, wanted: list[tuple[str, Any]], indent: int | None
) -> None:
    if dialect == "qwen3_coder":  # names and values of this form are bare
        wanted = [(name, data.draw(bare)) for name, _ in wanted]
    text, found = read(dialect, data.draw(cut(written(dialect, wanted, indent))))
    assert text == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == wanted


@pytest.mark.parametrize(
    ("dialect", "before"),
    [(d, "") for d in DIALECTS]
    + [("qwen3_coder", "<tool_call><function=f></function>"), ("json", "```json"), ("json", '{"name": "f"}')],
)
def test_white_space_without_end_is_read_in_time_that_grows_with_it(dialect: str, before: str) -> None:
    began = time.process_time()
    assert read(dialect, [before, " " * 400_000, "."])[0].endswith(" .")
    assert time.process_time() - began < 30, "minutes, were each looked at once for every other one"


def test_json_that_never_ends_its_strings_is_looked_through_once() -> None:
    values = '<parameter=o>{\\"</parameter>\n' * 3000
    began = time.process_time()
    (call,) = read("qwen3_coder", [f"<function=f>\n{values}</function>"])[1]
    assert call[1].count('"o": ') == 3000
    assert time.process_time() - began < 30


def test_schemas_that_refer_on_and_on_are_read() -> None:
    named: dict[str, Any] = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)}
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(900):
        nested = {"anyOf": [nested]}
    schema = {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": {**named, "3000": nested}}
    assert json_types(schema["properties"]["a"], schema) == {"integer"}


PARTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```json", "```"),
    *('{"name": "f"', ', "arguments": ', '{"x": 1}', '{"tool_calls": [', "null"),
    *("<function=", "</function>", "<parameter=a>", "<parameter=r>", "<function=f>", "</parameter>", ">"),
    *("}", "]", "[", "{", ";", ",", "\n", " ", "f", '"', "\\", "é", "🦊"),
]


@pytest.mark.parametrize("dialect", DIALECTS)
@given(data=st.data(), parts=st.lists(st.sampled_from(PARTS), max_size=14))
def test_streamed_is_whole_and_what_is_no_call_is_text(dialect: str, data: st.DataObject, parts: list[str]) -> None:
    text = "".join(parts)
    whole = read(dialect, [text])
    assert read(dialect, data.draw(cut(text))) == whole
    if not whole[1]:
        assert whole[0] == text


# Behind a whole call; what of it is dropped belongs to calls, or is white.
CALLS = {
    "hermes": '<tool_call>{"name": "f"}</tool_call>',
    "llama3_json": '{"name": "f"}',
    "mistral": '[TOOL_CALLS][{"name": "f"}]',
    "qwen3_coder": "<function=f></function>",
    "json": '{"tool_calls": [{"name": "f"}]}',
}


@pytest.mark.parametrize("dialect", DIALECTS)
@given(data=st.data(), before=st.text("a <é🦊", max_size=5), after=st.text('a <>]}"é🦊\n', max_size=8))
def test_text_around_calls_is_kept(dialect: str, data: st.DataObject, before: str, after: str) -> None:
    if dialect in ("llama3_json", "json"):
        before = ""  # there a call is the whole answer
    text = before + CALLS[dialect] + after
    found = read(dialect, data.draw(cut(text)))
    assert found == read(dialect, [text])
    assert found[1] == [("f", "{}")]
    assert found[0].split() == (before.rstrip() + after.rstrip()).split() or before.endswith(tuple(" "))
    assert "".join(found[0].split()) == "".join((before + after).split())


def test_half_a_character_is_no_name() -> None:
    written = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    assert read("hermes", [written]) == (written, [])
