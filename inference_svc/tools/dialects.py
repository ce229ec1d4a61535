"""How a model writes calls: which dialect its template speaks, and the grammar of an answer that must be one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

from kvsidecar.errors import InvalidRequest
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.grammars import with_whitespace
from inference_svc.tools.parsing import HERMES, HERMES_END, LLAMA, MISTRAL

Dialect = Literal["hermes", "llama3_json", "mistral", "json"]
# What a template says that was written for the dialect.
_SIGNS: dict[Dialect, tuple[str, ...]] = {
    "mistral": (MISTRAL,),
    "hermes": (HERMES,),
    "llama3_json": (LLAMA, "Environment: ipython", '"parameters": dictionary of argument name'),
}
# Written by tokens that are special in the vocabulary of some models.
MARKERS: dict[Dialect, tuple[str, ...]] = {
    "hermes": (HERMES, HERMES_END),
    "llama3_json": (LLAMA,),
    "mistral": (MISTRAL,),
    "json": (),
}
_MOST_CALLS = 16
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def dialect_of(template: str | None) -> Dialect:
    """The dialect of a chat template; the generic one where none is known."""
    for dialect, signs in _SIGNS.items():
        if any(sign in (template or "") for sign in signs):
            return dialect
    return "json"


def knows_tools(template: str | None) -> bool:
    """The template writes tools into the prompt by itself."""
    return re.search(r"\btools\b", template or "") is not None


def schema_of(tool: pb.Tool) -> dict[str, Any]:
    """JSON Schema of a function's arguments. Raises InvalidRequest."""
    if not tool.parameters:
        return _NOTHING
    try:
        schema = json.loads(tool.parameters)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the parameters of the tool {tool.name} are not JSON: {error}", param="tools") from error
    if not isinstance(schema, dict):
        raise InvalidRequest(f"the parameters of the tool {tool.name} must be a JSON schema object", param="tools")
    return {"type": "object"} | schema


def lark_of_calls(
    dialect: Dialect, tools: Iterable[pb.Tool], single: bool, special: Callable[[str], int | None], instead: str = ""
) -> str:
    """A grammar in Lark's form of an answer that calls at least one of the tools, or else is as the rule ``instead``
    says. ``special`` has the one token that a marker is, where text cannot spell it."""

    def marker(text: str) -> str:
        token = special(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    key = "parameters" if dialect == "llama3_json" else "arguments"
    rules, names = [], []
    for i, tool in enumerate(tools):
        opening = json.dumps(f'{{"name": {json.dumps(tool.name)}, "{key}": ')
        rules.append(f'call_{i}: {opening} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps(with_whitespace(schema_of(tool)))}")
        names.append(f"call_{i}")
    rules.append("call: " + " | ".join(names))

    def several(item: str, between: str) -> str:
        return item if single else f"{item} ({between} {item}){{0,{_MOST_CALLS - 1}}}"

    if dialect == "hermes":
        rules.append(f'marked: {marker(HERMES)} "\\n" call "\\n" {marker(HERMES_END)}')
        answer = several("marked", '"\\n"')
    elif dialect == "mistral":
        answer = f'{marker(MISTRAL)} "[" {several("call", json.dumps(", "))} "]"'
    elif dialect == "llama3_json":
        answer = several("call", '"; "')
    else:
        answer = f'{json.dumps(_WRAPPER)} {several("call", json.dumps(", "))} "]}}"'
    rules.append(f"calls: {answer}")
    if instead:
        rules.append(f"other: {instead}")
    return "\n".join([f"start: calls{' | other' if instead else ''}", *rules])


_WRAPPER = '{"tool_calls": ['
