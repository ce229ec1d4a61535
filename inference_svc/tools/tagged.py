"""Arguments as Qwen3-Coder writes them: each a text between tags, of which the function's schema says what it means.

<function=NAME>
<parameter=PLACE>
Oslo
</parameter>
</function>
"""

from __future__ import annotations

import json
from typing import Any

from kvsidecar.errors import InvalidRequest
from llguidance import regex_to_lark

from inference_svc.grammars import with_whitespace
from inference_svc.schemas import FORMATS, plain

PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
Schema = dict[str, Any]
_KINDS = frozenset(("string", "integer", "number", "boolean", "object", "array", "null"))
# What a schema of all arguments may say; the rest speaks of several of them at once.
_OF_ALL = frozenset(
    "type properties required additionalProperties title description $defs definitions $schema $id examples default"
    " strict".split()
)
# What a string's schema may say that is kept to.
_OF_STRINGS = frozenset(
    "type title description default examples enum const minLength maxLength pattern format deprecated readOnly".split()
)
_DAY, _TIME = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])", "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_ZONE = r"(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_HEX = "[0-9a-f]"
_FORMATS = {
    "date": _DAY,
    "time": _TIME + _ZONE,
    "date-time": f"{_DAY}T{_TIME}{_ZONE}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-[1-5]{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}",
    "email": r"[a-z0-9]+([._\-][a-z0-9]+)*@[a-z0-9]+(\.[a-z0-9]+)+",
}


def kinds_of(schema: Any, root: Schema) -> frozenset[str]:
    """The JSON types that a value may have; empty where nothing says so. ``root`` has what is referred to."""
    return _kinds_of(schema, root, set())


def _kinds_of(schema: Any, root: Schema, seen: set[int]) -> frozenset[str]:
    """Without what was ``seen`` before, which says nothing new."""
    if not isinstance(schema, dict) or id(schema) in seen:
        return frozenset()
    seen.add(id(schema))
    if "$ref" in schema:
        return _kinds_of(_referred(schema["$ref"], root), root, seen)
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset((kinds,)) & _KINDS
    if isinstance(kinds, list):
        return frozenset(kind for kind in kinds if isinstance(kind, str)) & _KINDS
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return frozenset(map(_kind, values)) if isinstance(values, list) else frozenset()
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(name), list):
            return frozenset[str]().union(*(_kinds_of(part, root, seen) for part in schema[name]))
    return frozenset()


def _referred(reference: Any, root: Schema) -> Any:
    found: Any = root
    for step in str(reference).removeprefix("#").strip("/").split("/"):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _kind(value: Any) -> str:
    named = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return named.get(type(value), "null")


def is_text(kinds: frozenset[str]) -> bool:
    """Values of these types are text as it stands."""
    return kinds <= {"string"}


def json_of(text: str, kinds: frozenset[str]) -> str:
    """The JSON that a text between tags means where values may have these types: a string where it means no other."""
    word, bare = text.strip().lower(), text.strip()
    if "null" in kinds and word in ("null", "none"):
        return "null"
    if "boolean" in kinds and word in ("true", "false"):
        return word
    if kinds - {"null"} != {"string"} and not is_text(kinds):
        try:
            value = json.loads(bare, parse_constant=_no_number)
        except (ValueError, RecursionError):
            value = None
        kind = _kind(value)
        if value is not None and (kind in kinds or (kind == "integer" and "number" in kinds)):
            return bare
    return json.dumps(text, ensure_ascii=False)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def opening_of(key: str) -> str:
    """What stands on the line before an argument."""
    return f"{PARAMETER}{key}>\n"


def ending(schema: Schema, name: str) -> Schema:
    """The same; it has ``uniqueItems``. Raises InvalidRequest for a schema of numbers, too, whose end nothing tells."""
    kinds = kinds_of(schema, schema)
    if not kinds or kinds & {"integer", "number"}:
        raise InvalidRequest(
            f"the tool {name} has uniqueItems beside values that may be numbers; say of what type they are",
            param="tools",
        )
    return schema


def rules_of_parameters(number: int, name: str, schema: Schema) -> tuple[list[str], list[tuple[str, Schema]]]:
    """Rules in Lark's form: ``call_NUMBER`` is what stands between ``<function=`` and ``</function>``, with arguments
    as the schema has them, in its order. And the arguments with ``uniqueItems``, which are not kept to, by what stands
    before them. Raises InvalidRequest for what calls of this form cannot be kept to."""
    wrong = sorted(schema.keys() - _OF_ALL)
    if wrong:
        raise _refused(name, f"the keyword {wrong[0]!r} of all arguments")
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise _refused(name, "properties that are no object, or required that is no list")
    missing: Schema = {key: {} for key in required if isinstance(key, str) and key not in properties}
    call, rules, unique = [json.dumps(f"{name}>\n")], list[str](), list[tuple[str, Schema]]()
    shared: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for i, (key, value) in enumerate({**properties, **missing}.items()):
        if any(sign in key for sign in "<>\n"):
            raise _refused(name, f"an argument called {key[:80]!r}")
        rule = f"given_{number}_{i}"
        rules += _rules_of_value(rule, key, value, schema, shared, name, unique)
        call.append(rule if key in required else f"{rule}?")
    return [f"call_{number}: {' '.join(call)}", *rules], unique


def _rules_of_value(
    rule: str, key: str, value: Any, root: Schema, shared: Schema, name: str, unique: list[tuple[str, Schema]]
) -> list[str]:
    """Adds to ``unique`` a value with ``uniqueItems``."""
    opening, end = json.dumps(opening_of(key)), json.dumps(f"\n{PARAMETER_END}\n")
    text = _text_schema(value, root)
    if text is None:
        whole = {**value, **shared} if isinstance(value, dict) else value
        body = with_whitespace(whole) if isinstance(whole, dict) else {}
        bare = plain(body, unique=False)
        if bare != body:
            unique.append((opening_of(key), ending(body, name)))
        return [f"{rule}: {opening} {rule}_json {end}", f"{rule}_json: %json {json.dumps(bare)}"]
    values = [text["const"]] if "const" in text else text.get("enum")
    if values is not None:
        return [f"{rule}: {opening} ({' | '.join(map(json.dumps, values))}) {end}"]
    terminal = rule.upper()
    return [
        f'{rule}: {opening} {rule}_text "\\n"',
        f"{rule}_text[suffix=/\\n?<\\/parameter>/]: {terminal}",
        f"{terminal}: {_regex(text, name, key)}",
    ]


def _text_schema(value: Any, root: Schema) -> Schema | None:
    """The schema of a value that is written as text, or null; None for one that is written as JSON."""
    if not isinstance(value, dict):
        return {}
    if "$ref" in value:
        value = _referred(value["$ref"], root)
        return _text_schema(value, root) if isinstance(value, dict) and "$ref" not in value else None
    if not isinstance(value.get("enum", []), list):
        return None
    kinds = kinds_of(value, root)
    if not kinds - {"null"}:
        return None if kinds else {key: part for key, part in value.items() if key in _OF_STRINGS}
    if kinds - {"null"} != {"string"}:
        return None
    for several in ("anyOf", "oneOf"):
        if several in value:
            if not isinstance(value[several], list):
                return None
            parts = [part for part in value[several] if kinds_of(part, root) == {"string"}]
            return _text_schema(parts[0], root) if len(parts) == 1 else None
    return {**value, "enum": [one for one in value["enum"] if isinstance(one, str)]} if "enum" in value else value


def _regex(schema: Schema, name: str, key: str) -> str:
    """A terminal of strings that a schema allows, and that do not end too early."""
    wrong = sorted(schema.keys() - _OF_STRINGS - {"$defs", "definitions", "x-guidance"})
    if wrong:
        raise _refused(name, f"the keyword {wrong[0]!r} of the argument {key!r}")
    least, most = schema.get("minLength") or 0, schema.get("maxLength")
    parts = [f"/(?s:.){{{least},{'' if most is None else most}}}/"]
    form = str(schema.get("format"))
    if form in FORMATS:
        if form not in _FORMATS:
            raise _refused(name, f"the format {form!r} of the argument {key!r}")
        parts.append(f"/{_FORMATS[form]}/")
    if "pattern" in schema:
        try:
            parts.append(_search(str(schema["pattern"])))
        except ValueError as error:
            raise _refused(name, f"a pattern of the argument {key!r} that is none ({error})") from error
    if len(parts) == 1:
        parts.append(r"~/(?s:.*)\n<(parameter=|\/function>)(?s:.*)/")
    return " & ".join(parts)


def _search(pattern: str) -> str:
    """JSON Schema's patterns are found anywhere unless they say where."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[1 if begins else 0 : -1 if ends else None]
    found = regex_to_lark(f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}", "")
    return f"/{found}/"


def _refused(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"the tool {name} has {what}, which calls in this model's form (qwen3_coder) cannot be kept to", param="tools"
    )
