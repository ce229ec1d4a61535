"""Qwen3-Coder arguments: texts between tags, whose types are in the function's schema.

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

from inference_svc.structured_output.grammar_compiler import for_compiler
from inference_svc.structured_output.schema_cleanup import FORMATS

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
# Models may omit the end tag of a value before the next value, or before the end of the call.
VALUE_ENDS = (f"\n{PARAMETER_END}", PARAMETER_END, f"\n{PARAMETER}", f"\n{FUNCTION_END}")
Schema = dict[str, Any]
_KINDS = frozenset(("string", "integer", "number", "boolean", "object", "array", "null"))
# Supported keywords of the arguments' schema. Other keywords relate several arguments to each other.
_ARGUMENTS_KEYWORDS = frozenset(
    "type properties required additionalProperties title description $defs definitions $schema $id examples default"
    " strict".split()
)
# Keywords that the grammar enforces for strings.
_STRING_KEYWORDS = frozenset(
    "type title description default examples enum const minLength maxLength pattern format deprecated readOnly".split()
)
# Keywords that the grammar ignores for strings.
_IGNORED_KEYWORDS = frozenset("not anyOf oneOf allOf if $ref".split())
_MAX_REFERENCES = 16
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


def json_types(schema: Any, root: Schema) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty if it names no type. Resolves references in ``root``."""
    kinds, due, seen = set[str](), [schema], set[int]()
    while due:
        schema = due.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        given = schema.get("type")
        if "$ref" in schema:
            due.append(_referred(schema["$ref"], root))
        elif isinstance(given, str | list):
            kinds.update(kind for kind in ([given] if isinstance(given, str) else given) if isinstance(kind, str))
        elif "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            kinds.update(map(_kind, values if isinstance(values, list) else ()))
        else:
            parts = [schema[name] for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list)]
            due += parts[0] if parts else []
    return frozenset(kinds & _KINDS)


def _referred(reference: Any, root: Schema) -> Any:
    found: Any = root
    for step in str(reference).removeprefix("#").strip("/").split("/"):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _kind(value: Any) -> str:
    named = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return named.get(type(value), "null")


def is_plain_text(kinds: frozenset[str]) -> bool:
    """True if values of these types are plain text. Without a known type, a value is plain text, too."""
    return kinds <= {"string"}


def is_text_or_null(kinds: frozenset[str]) -> bool:
    """True if values of these types are plain text, or null."""
    return kinds <= {"string", "null"}


def value_to_json(text: str, kinds: frozenset[str]) -> str:
    """Convert a text between tags to JSON of one of these types. If no type fits, the JSON is a string."""
    word, bare = text.strip().lower(), text.strip()
    if "null" in kinds and word in ("null", "none"):
        return "null"
    if "boolean" in kinds and word in ("true", "false"):
        return word
    if not is_text_or_null(kinds):
        try:
            value = _read(bare)
        except (ValueError, RecursionError):
            value = None
        kind = _kind(value)
        if value is not None and (kind in kinds or (kind == "integer" and "number" in kinds)):
            return bare
    return json.dumps(text, ensure_ascii=False)


def _read(text: str) -> Any:
    """Parse JSON, with 0 for every integer, because Python refuses integers of thousands of digits.

    Raises ValueError, RecursionError.
    """
    return json.loads(text, parse_constant=_no_number, parse_int=lambda _: 0)


def is_json(text: str) -> bool:
    """True if a text is a JSON value."""
    try:
        _read(text)
    except (ValueError, RecursionError):
        return False
    return True


class JsonStringTracker:
    """Tracks whether a JSON text is inside a string, piece by piece.

    Only a text that starts with ``{``, ``[`` or ``"`` can be inside a string.
    """

    def __init__(self) -> None:
        self._open = self._escaped = False
        self._begun = ""
        self._seen = 0  # number of pieces that were scanned

    def inside_after(self, pieces: list[str]) -> bool:
        """True if the text is inside a string after ``pieces``. Scans only pieces that are new since the last call."""
        for character in "".join(pieces[self._seen :]):
            self._begun = self._begun or character.strip()
            if self._escaped:
                self._escaped = False
            elif character == '"':
                self._open = not self._open
            else:
                self._escaped = self._open and character == "\\"
        self._seen = len(pieces)
        return self._open and self._begun in '{["'


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def parameter_rules(number: int, name: str, schema: Schema) -> list[str]:
    """Build Lark rules for a call: ``call_NUMBER`` is the text between ``<function=`` and ``</function>``.

    The arguments are those of the schema, in its order. Raises InvalidRequest for a schema that a grammar of this form
    cannot enforce.
    """
    wrong = sorted(schema.keys() - _ARGUMENTS_KEYWORDS)
    if wrong:
        raise _refused(name, f"the keyword {wrong[0]!r} of all arguments")
    if "object" not in json_types(schema, schema):
        raise _refused(name, "arguments that are no object")
    properties = schema.get("properties") or {}
    required = schema.get("required") or []
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise _refused(name, "properties that are no object, or required that is no list")
    missing: Schema = {key: {} for key in required if isinstance(key, str) and key not in properties}
    call, rules = [json.dumps(f"{name}>\n")], list[str]()
    shared: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for i, (key, value) in enumerate({**properties, **missing}.items()):
        if value is False and key not in required:
            continue
        if any(sign in key for sign in "<>\n"):
            raise _refused(name, f"an argument called {key[:80]!r}")
        rule = f"given_{number}_{i}"
        rules += _rules_of_value(rule, key, value, schema, shared, name)
        call.append(rule if key in required else f"{rule}?")
    return [f"call_{number}: {' '.join(call)}", *rules]


def _rules_of_value(rule: str, key: str, value: Any, root: Schema, shared: Schema, name: str) -> list[str]:
    opening, end = _quoted(f"{PARAMETER}{key}>\n"), json.dumps(f"\n{PARAMETER_END}\n")
    text = _text_schema(value, root)
    if text is None and json_types(value, root) - {"null"} == {"string"}:
        raise _refused(name, f"several schemas of the string {key!r}")
    if text is None:
        whole = {**value, **shared} if isinstance(value, dict) else value
        body = for_compiler(whole) if isinstance(whole, dict) else {}
        return [f"{rule}: {opening} {rule}_json {end}", f"{rule}_json: %json {_quoted(body)}"]
    values = [text["const"]] if "const" in text else text.get("enum")
    if values is not None:
        ends = [one for one in values if any(end in f"{one}\n" for end in VALUE_ENDS)]
        if ends:
            raise _refused(name, f"a value of the argument {key!r} that has the text in it that ends values")
        return [f"{rule}: {opening} ({' | '.join(map(_quoted, values))}) {end}"]
    terminal = rule.upper()
    return [
        f'{rule}: {opening} {terminal}_ENDED "\\n"',
        # If there is no line end before the end tag, the value itself must not end with a line end.
        f'{terminal}_ENDED: {terminal} "\\n{PARAMETER_END}" | {terminal}_LINE "{PARAMETER_END}"',
        f"{terminal}_LINE: {terminal} & ~/(?s:.*)\\n/",
        f"{terminal}: {_regex(text, name, key)}",
    ]


def _quoted(value: Any) -> str:
    """Return a value as JSON without escapes, because the size of a grammar is limited."""
    return json.dumps(value, ensure_ascii=False)


def _text_schema(value: Any, root: Schema) -> Schema | None:
    """Return the schema of a value that is written as text (or null); None if the value is written as JSON."""
    if not isinstance(value, dict):
        return {}
    for _ in range(_MAX_REFERENCES):
        if not isinstance(value, dict) or "$ref" not in value:
            break
        value = _referred(value["$ref"], root)
    if not isinstance(value, dict) or "$ref" in value:
        return None
    if not isinstance(value.get("enum", []), list):
        return None
    kinds = json_types(value, root)
    if not kinds - {"null"}:
        return (
            None if kinds else {key: part for key, part in value.items() if key in _STRING_KEYWORDS | _IGNORED_KEYWORDS}
        )
    if kinds - {"null"} != {"string"}:
        return None
    for several in ("anyOf", "oneOf"):
        if several in value:
            if not isinstance(value[several], list):
                return None
            parts = [part for part in value[several] if json_types(part, root) == {"string"}]
            return _text_schema(parts[0], root) if len(parts) == 1 else None
    return {**value, "enum": [one for one in value["enum"] if isinstance(one, str)]} if "enum" in value else value


def _regex(schema: Schema, name: str, key: str) -> str:
    """Build a terminal for the strings that a schema allows. Excludes strings that contain the end of a value."""
    wrong = sorted(schema.keys() - _STRING_KEYWORDS - {"$defs", "definitions", "x-guidance"})
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
    parts.append(r"~/(?s:.*)(\n<(parameter=|\/function>)|<\/parameter>)(?s:.*)/")
    return " & ".join(parts)


def _search(pattern: str) -> str:
    """Translate a JSON Schema pattern, which matches anywhere unless anchored."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[1 if begins else 0 : -1 if ends else None]
    found = regex_to_lark(f"{'' if begins else '(?s:.*)'}({inner}){'' if ends else '(?s:.*)'}", "")
    return f"/{found}/"


def _refused(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"the tool {name} has {what}, which calls in this model's form (qwen3_coder) cannot be kept to", param="tools"
    )
