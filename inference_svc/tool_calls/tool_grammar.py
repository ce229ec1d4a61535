"""Tool grammars: Lark grammars of answers with required or strict tool calls.

The rule ``call_0`` is a call of the first function, ``call_1`` of the second, and so on. ``call`` is any of these
rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.sequence.detokenizer import ReasoningMarkers
from inference_svc.structured_output.grammar_compiler import for_compiler
from inference_svc.tool_calls.json_call_parser import HERMES, HERMES_END, LLAMA, MISTRAL, first_keys
from inference_svc.tool_calls.qwen3_coder_arguments import FUNCTION, FUNCTION_END, parameter_rules
from inference_svc.tool_calls.tool_call_format import ToolCallFormat, parameters_schema

# Maps a marker to its special token; None if it is ordinary text.
SpecialToken = Callable[[str], int | None]
_MAX_CALLS = 16
_WRAPPER = '{"tool_calls": ['


def required_calls_grammar(
    dialect: ToolCallFormat, tools: Iterable[pb.Tool], single: bool, special: SpecialToken
) -> str:
    """Build the grammar of an answer of one or more calls, without other text. Raises InvalidRequest."""
    return "\n".join([f"start: {_calls(dialect, single, special)}", *_rules(dialect, tools)])


def optional_calls_grammar(
    dialect: ToolCallFormat,
    tools: Iterable[pb.Tool],
    single: bool,
    special: SpecialToken,
    specials: Sequence[int],
    reasoning: ReasoningMarkers | None,
) -> str:
    """Build the grammar of text and calls in any order.

    After the beginning of a call, the text must match the tool's grammar. ``specials`` are special tokens that may
    occur in the text. ``reasoning`` has the markers of reasoning before the answer. Raises InvalidRequest.
    """
    rules = [*_rules(dialect, tools), "TEXT: /(?s:.*)/"]
    if dialect in ("json", "llama3_json"):  # a call is the whole answer
        return "\n".join([*_whole_answer(dialect, single, special, specials, reasoning), *rules])
    trigger, rest = _marked(dialect, single, special)
    token = special(trigger)
    if token is None:
        rules.append(f"begun[lazy]: TEXT {json.dumps(trigger)}")
    else:
        rules.append(f"begun: TEXT <[{token}]>")
    rules.append(f"marked: begun {rest}")
    several = "marked?" if single else "marked*"
    noise = _ranges([one for one in specials if one != token])
    if noise:
        rules.append(f"noise: TEXT <[{noise}]>")
        several = "noise* marked? noise*" if single else "(noise | marked)*"
    return "\n".join([f"start: {several} TEXT", *rules])


def _whole_answer(
    dialect: ToolCallFormat,
    single: bool,
    special: SpecialToken,
    specials: Sequence[int],
    reasoning: ReasoningMarkers | None,
) -> list[str]:
    """Build the rules of an answer that is either calls or text, and of the reasoning before it."""
    begin, end = reasoning or ("", "")
    begin_token, end_token = (special(one) if one else None for one in (begin, end))
    marker = special(LLAMA) if dialect == "llama3_json" else None
    keys = "|".join(first_keys(dialect, exact=True))
    opening = "(" + _escaped(LLAMA) + r")?(```)?(json)?[ \t\r\n\[]*\{[ \t\r\n,]*"
    excluded = f'~/{opening}"(({keys})"|[^"]*\\\\)(?s:.*)/'
    # Text begins with neither white space nor reasoning: it would match all that follows them, also a call.
    if begin and begin_token is None:
        excluded += f" & ~/{begin}(?s:.*)/"
    text = "OTHER"
    if first := _ranges([one for one in specials if one not in (marker, begin_token)]):
        text = f"(OTHER | <[{first}]> TEXT)"
    if more := _ranges([one for one in specials if one != marker]):
        text += f" (<[{more}]> TEXT)*"
    marked = "" if marker is None else f" | <[{marker}]> calls"
    rules = [
        "answer: SPACE? content?",
        f"content: calls{marked} | {text}",
        f"calls: {_calls(dialect, single, special)}",
        r"SPACE: /[ \t\r\n]+/",
        r"OTHER: /[^ \t\r\n](?s:.*)/ & " + excluded,
    ]
    if reasoning is None:
        return ["start: answer", *rules]
    noise = _ranges([one for one in specials if one != end_token])
    thought = f"thought[lazy]: TEXT {json.dumps(end)}" if end_token is None else f"thought: TEXT <[{end_token}]>"
    before = f"(TEXT <[{noise}]>)* " if noise else ""
    start = f"SPACE? ({_marker(begin, special)} reasoned | content)?" if begin else "reasoned"
    return [f"start: {start}", f"reasoned: {before}(thought answer | TEXT)", thought, *rules]


def _ranges(tokens: Sequence[int]) -> str:
    """Format tokens as ranges: ``1-3,7`` for 1, 2, 3 and 7."""
    found: list[list[int]] = []
    for token in sorted(tokens):
        if found and found[-1][1] == token - 1:
            found[-1][1] = token
        else:
            found.append([token, token])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in found)


def _escaped(text: str) -> str:
    return text.replace("|", r"\|")


def _rules(dialect: ToolCallFormat, tools: Iterable[pb.Tool]) -> list[str]:
    """Build the rules of each tool's call."""
    rules, names = [], list[str]()
    key = "parameters" if dialect == "llama3_json" else "arguments"
    for i, tool in enumerate(tools):
        names.append(f"call_{i}")
        if dialect == "qwen3_coder":
            rules += parameter_rules(i, tool.name, parameters_schema(tool))
            continue
        opening = f'{{"name": {json.dumps(tool.name)}, "{key}": '
        rules.append(f'call_{i}: {json.dumps(opening)} arguments_{i} "}}"')
        schema = for_compiler(parameters_schema(tool))
        rules.append(f"arguments_{i}: %json {json.dumps(schema, ensure_ascii=False)}")
    rules.append("call: " + " | ".join(names))
    return rules


def _several(item: str, between: str, single: bool) -> str:
    return item if single else f"{item} ({between} {item}){{0,{_MAX_CALLS - 1}}}"


def _marker(text: str, special: SpecialToken) -> str:
    token = special(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def _calls(dialect: ToolCallFormat, single: bool, special: SpecialToken) -> str:
    """Build the rule for answers with only calls."""
    if dialect in ("hermes", "qwen3_coder"):
        trigger, rest = _marked(dialect, single, special)
        wrapped = f"{_marker(trigger, special)} {rest}"
        if dialect == "qwen3_coder":
            opening, end = _marker(HERMES, special), _marker(HERMES_END, special)
            wrapped = f'{opening} "\\n" {wrapped} "\\n" {end}'
        return _several(f"({wrapped})", '"\\n"', single)
    if dialect == "mistral":
        return f"{_marker(MISTRAL, special)} {_marked(dialect, single, special)[1]}"
    if dialect == "llama3_json":
        return _several("call", '"; "', single)
    return f'{json.dumps(_WRAPPER)} {_several("call", json.dumps(", "), single)} "]}}"'


def _marked(dialect: ToolCallFormat, single: bool, special: SpecialToken) -> tuple[str, str]:
    """Return the marker that begins a call within text, and the rule after it."""
    if dialect == "hermes":
        return HERMES, f'"\\n" call "\\n" {_marker(HERMES_END, special)}'
    if dialect == "qwen3_coder":
        return FUNCTION, f"call {json.dumps(FUNCTION_END)}"
    return MISTRAL, f'"[" {_several("call", json.dumps(", "), single)} "]"'
