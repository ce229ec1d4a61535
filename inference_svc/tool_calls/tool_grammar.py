"""Grammars, in Lark's form, of answers that call: those that must, and those in which a call that has begun is kept to
its function's schema.

Functions become rules ``call_0``, ``call_1`` and so on, and ``call`` is any of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.structured_output.grammar_compiler import with_whitespace
from inference_svc.structured_output.schema_normalize import plain
from inference_svc.tool_calls.qwen3_coder import FUNCTION, FUNCTION_END, ending, rules_of_parameters
from inference_svc.tool_calls.tool_call_format import Dialect, schema_of
from inference_svc.tool_calls.tool_call_parser import HERMES, HERMES_END, LLAMA, MISTRAL, first_keys
from inference_svc.unique.within import From, Opening, Tags

# The one token that a marker is, where text cannot spell it.
Special = Callable[[str], int | None]
_MOST_CALLS = 16
_TAGS = Tags(FUNCTION.encode(), b">", f"\n{FUNCTION_END}".encode())
_WRAPPER = '{"tool_calls": ['


# A function's name, what stands before one of its values, and that value's schema, which has uniqueItems.
Unique = tuple[str, str, dict[str, Any]]


@dataclass(frozen=True)
class Calls:
    """A grammar in Lark's form, and what it leaves out: where arguments begin that must have no duplicates. ``marker``
    is the token that calls begin with, where it is one, ``tags`` what they stand between, where these are text."""

    lark: str
    openings: Sequence[Opening]
    marker: int | None
    tags: Tags | None = None


def grammar_of_calls(dialect: Dialect, tools: Iterable[pb.Tool], single: bool, special: Special) -> Calls:
    """An answer of nothing but calls of the tools, one at least. Raises InvalidRequest."""
    rules, unique = _rules(dialect, list(tools))
    lark = "\n".join([f"start: {_calls(dialect, single, special)}", *rules])
    return _of(dialect, lark, unique, special)


def grammar_of_free_calls(
    dialect: Dialect, tools: Iterable[pb.Tool], single: bool, special: Special, specials: Sequence[int]
) -> Calls:
    """An answer of text and calls as the model likes, where a call that has begun is one of a tool. ``specials`` are
    the tokens that text cannot spell and that may stand in it. Raises InvalidRequest."""
    found, unique = _rules(dialect, list(tools))
    lark = _lark_of_free_calls(dialect, [*found, "TEXT: /(?s:.*)/"], single, special, specials)
    return _of(dialect, lark, unique, special)


def _of(dialect: Dialect, lark: str, unique: list[Unique], special: Special) -> Calls:
    tags = _TAGS if dialect == "qwen3_coder" else None
    return Calls(lark, _openings(dialect, unique, special), _marker_token(dialect, special), tags)


def _lark_of_free_calls(
    dialect: Dialect, rules: list[str], single: bool, special: Special, specials: Sequence[int]
) -> str:
    if dialect in ("json", "llama3_json"):  # a call is the whole answer
        keys = "|".join(first_keys(dialect, exact=True))
        opening = r"[ \t\r\n]*(" + _escaped(LLAMA) + r")?(```)?(json)?[ \t\r\n\[]*\{[ \t\r\n,]*"
        rules.append(f"calls: {_calls(dialect, single, special)}")
        rules.append(f'OTHER: /(?s:.*)/ & ~/{opening}"(({keys})"|[^"]*\\\\)(?s:.*)/')
        marker = special(LLAMA) if dialect == "llama3_json" else None
        marked = "" if marker is None else f" | <[{marker}]> calls"
        return "\n".join([f"start: calls{marked} | OTHER{_noise(specials, marker)}", *rules])
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


def _noise(specials: Sequence[int], marker: int | None) -> str:
    ranges = _ranges([one for one in specials if one != marker])
    return f" (<[{ranges}]> TEXT)*" if ranges else ""


def _ranges(tokens: Sequence[int]) -> str:
    """``1-3,7`` of 1, 2, 3 and 7."""
    found: list[list[int]] = []
    for token in sorted(tokens):
        if found and found[-1][1] == token - 1:
            found[-1][1] = token
        else:
            found.append([token, token])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in found)


def _escaped(text: str) -> str:
    return text.replace("|", r"\|")


def _marker_token(dialect: Dialect, special: Special) -> int | None:
    markers: dict[Dialect, str] = {"hermes": HERMES, "mistral": MISTRAL, "llama3_json": LLAMA}
    return special(markers[dialect]) if dialect in markers else None


def _openings(dialect: Dialect, unique: list[Unique], special: Special) -> list[Opening]:
    """Where values begin of which it is known what stands right before them in a call."""
    marked = _marker_token(dialect, special) is not None
    places: list[tuple[From, str]]
    if dialect == "hermes":
        places = [("marker", "\n") if marked else ("anywhere", f"{HERMES}\n")]
    elif dialect == "mistral":
        places = [("marker", "[") if marked else ("anywhere", f"{MISTRAL}["), ("value", "}, ")]
    elif dialect == "llama3_json":
        places = [("answer", ""), ("value", "}; "), *([("marker", "")] if marked else [])]  # type: ignore[list-item]
    elif dialect == "json":
        places = [("answer", _WRAPPER), ("value", "}, ")]
    else:
        return [Opening("call", text.encode(), schema, f"{FUNCTION}{name}>".encode()) for name, text, schema in unique]
    return [Opening(since, (before + text).encode(), schema) for _, text, schema in unique for since, before in places]


def _rules(dialect: Dialect, tools: list[pb.Tool]) -> tuple[list[str], list[Unique]]:
    """What each tool's call looks like, and the values with ``uniqueItems``, which are not kept to."""
    rules, given, several = [], list[Unique](), dialect in ("mistral", "llama3_json", "json")
    key, some = "parameters" if dialect == "llama3_json" else "arguments", False
    for i, tool in enumerate(tools):
        if dialect == "qwen3_coder":
            of_tool, more = rules_of_parameters(i, tool.name, schema_of(tool))
            rules += of_tool
            given += [(tool.name, text, schema) for text, schema in more]
            some = some or bool(more)
            continue
        opening = f'{{"name": {json.dumps(tool.name)}, "{key}": '
        schema = with_whitespace(schema_of(tool))
        bare = plain(schema, unique=False)
        # Where calls stand in a row, the end of each is where the next one begins.
        if bare != schema or several:
            given.append((tool.name, opening, schema))
        some = some or bare != schema
        rules.append(f'call_{i}: {json.dumps(opening)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps(bare)}")
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools))))
    return rules, [(name, text, ending(schema, name)) for name, text, schema in given] if some else []


def _several(item: str, between: str, single: bool) -> str:
    return item if single else f"{item} ({between} {item}){{0,{_MOST_CALLS - 1}}}"


def _marker(text: str, special: Special) -> str:
    token = special(text)
    return json.dumps(text) if token is None else f"<[{token}]>"


def _calls(dialect: Dialect, single: bool, special: Special) -> str:
    """An answer of nothing but calls."""
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


def _marked(dialect: Dialect, single: bool, special: Special) -> tuple[str, str]:
    """The text by which a call begins within others, and what follows that."""
    if dialect == "hermes":
        return HERMES, f'"\\n" call "\\n" {_marker(HERMES_END, special)}'
    if dialect == "qwen3_coder":
        return FUNCTION, f"call {json.dumps(FUNCTION_END)}"
    return MISTRAL, f'"[" {_several("call", json.dumps(", "), single)} "]"'
