"""JSON schemas in fewer keywords: what the grammars' compiler does not know, said in what it does, for the same values.

Of patterns that look around, ``oneOf``, ``not``, ``if``, ``dependencies`` and ``propertyNames`` that is possible for
the forms that people write; others stay as they are, and the compiler refuses them by name. Each rule follows from the
keyword's words in https://json-schema.org/draft/2020-12/json-schema-core and -validation; ``tests/inference_svc/
test_equivalents.py`` holds both schemas against the same values.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

from inference_svc.complement import NotWritten, complement
from inference_svc.lookaround import looks_around, without_looking
from inference_svc.structured_output.schema_normalize import NAMED, SCHEMAS

Schema = dict[str, Any]
_REMARKS = frozenset("title description default examples $comment deprecated".split())
_DIALECT = re.compile(r"https?://json-schema\.org/(draft-0[4-7]|draft/20(19-09|20-12))/schema#?")
_MOST_ALTERNATIVES, _MOST_DEPENDENCIES, _DEEPEST = 64, 6, 16  # of one object; how deep a schema is followed
# Of a whole schema, so that it is read and compiled within a second or two: objects told apart and dependencies, which
# are compiled in all their combinations, what is looked at for ``not`` and ``if``, and complements.
_MOST_TOLD_APART, _MOST_DEPENDENT, _MOST_NEGATED, _MOST_COMPLEMENTS = 256, 12, 500, 16
_FOUND: dict[type, str] = {
    bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object", type(None): "null",
}  # fmt: skip


@dataclass
class _Whole:
    """The schema that references begin at, and how much may still be done for it."""

    root: Schema
    negated: int = _MOST_NEGATED
    complements: int = _MOST_COMPLEMENTS
    told_apart: int = _MOST_TOLD_APART
    dependent: int = _MOST_DEPENDENT

    def complement(self, pattern: str) -> str:
        """Raises NotWritten."""
        if not self.complements:
            raise NotWritten("there are too many of its kind")
        self.complements -= 1
        return complement(pattern)


def rewritten(schema: Schema) -> Schema:
    """A schema for the same values in fewer keywords. Where a pattern is concerned, texts with line ends may be
    fewer."""
    found: Schema = _rewritten(schema, _Whole(schema))
    return found


def _rewritten(schema: Any, whole: _Whole) -> Any:
    if isinstance(schema, list):
        return [_rewritten(part, whole) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out: Schema = {}
    for key, value in schema.items():
        if key in SCHEMAS:
            value = _rewritten(value, whole)
        elif key in NAMED and isinstance(value, dict):
            value = {name: _rewritten(part, whole) for name, part in value.items()}
        out[key] = value
    if schema is whole.root and isinstance(out.get("$schema"), str) and not _DIALECT.fullmatch(out["$schema"]):
        del out["$schema"]  # somebody's own dialect of the common keywords
    if not isinstance(out.get("allOf", []), list):
        return out  # for the compiler to refuse
    more: list[Schema] = []
    for rule in _RULES:
        more += rule(out, whole)
    if more:
        out["allOf"] = [*out.get("allOf", ()), *more]
    return out


# Each takes from a schema what it knows to say otherwise, and returns that: schemas that must hold besides.


def _pattern(schema: Schema, whole: _Whole) -> list[Schema]:
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or not looks_around(pattern):
        return []
    try:
        found = without_looking(pattern, whole.complement)
    except NotWritten:
        return []
    del schema["pattern"]
    kind = {"type": "string"} if schema.get("type") == "string" else {}
    alternatives = [[{**kind, "pattern": one} for one in each] for each in found]
    if len(alternatives) > 1:
        return [{"anyOf": [each[0] if len(each) == 1 else {"allOf": each} for each in alternatives]}]
    first, *others = alternatives[0]
    schema["pattern"] = first["pattern"]
    return others


def _one_of(schema: Schema, whole: _Whole) -> list[Schema]:
    parts = schema.get("oneOf")
    if not isinstance(parts, list) or len(parts) < 2 or not all(isinstance(part, dict) for part in parts):
        return []
    if all(part.keys() - _REMARKS == {"required"} and _names(part["required"]) is not None for part in parts):
        found = _one_of_required([frozenset(part["required"]) for part in parts])
        if not found or len(found) > whole.told_apart:
            return []
        whole.told_apart -= len(found)
    elif _are_apart([_types(part, whole.root) for part in parts]):
        found = parts
    else:
        return []
    del schema["oneOf"]
    return [{"anyOf": found}]


def _are_apart(kinds: list[frozenset[str]]) -> bool:
    """None of these is in two of them."""
    return sum(map(len, kinds)) == len(frozenset().union(*kinds))


def _one_of_required(sets: list[frozenset[str]]) -> list[Schema]:
    """Objects with all members of exactly one of these sets; nothing where that would take too many words."""
    found: list[Schema] = []
    if len(sets) > _MOST_ALTERNATIVES:
        return []
    for i, one in enumerate(sets):
        absent = [sorted(other - one) for j, other in enumerate(sets) if j != i]
        if math.prod(len(names) for names in absent) > _MOST_ALTERNATIVES:
            return []
        for names in {frozenset(choice) for choice in product(*absent)}:
            without = dict.fromkeys(sorted(names), False)
            found.append({"type": "object", "required": sorted(one), "properties": without})
            if len(found) > _MOST_ALTERNATIVES:
                return []
    return sorted(found, key=json.dumps)


def _dependencies(schema: Schema, whole: _Whole) -> list[Schema]:
    keys = [key for key in ("dependencies", "dependentRequired", "dependentSchemas") if key in schema]
    if not all(isinstance(schema[key], dict) for key in keys):
        return []
    count = sum(len(schema[key]) for key in keys)
    if count > min(_MOST_DEPENDENCIES, whole.dependent):
        return []
    whole.dependent -= count
    found: list[Schema] = []
    for key in keys:
        for name, wanted in schema.pop(key).items():
            then = {"required": wanted} if isinstance(wanted, list) else _rewritten(wanted, whole)
            found.append({"anyOf": [{"properties": {name: False}}, then]})
    return found


def _not(schema: Schema, whole: _Whole) -> list[Schema]:
    found = _negated(schema["not"], schema, whole) if "not" in schema else None
    if found is None:
        return []
    del schema["not"]
    return [found]


def _if(schema: Schema, whole: _Whole) -> list[Schema]:
    if "if" not in schema:
        return []
    otherwise = _negated(schema["if"], schema, whole)
    if otherwise is None:
        return []
    parts = [_rewritten(schema.pop(key, True), whole) for key in ("if", "then", "else")]
    return [{"anyOf": [{"allOf": [parts[0], parts[1]]}, {"allOf": [otherwise, parts[2]]}]}]


def _property_names(schema: Schema, whole: _Whole) -> list[Schema]:
    names, properties = schema.get("propertyNames"), schema.get("properties", {})
    if not isinstance(names, dict) or not isinstance(properties, dict) or "patternProperties" in schema:
        return []
    said = names.keys() - _REMARKS - ({"type"} if names.get("type") == "string" else set())
    others = schema.get("additionalProperties", True)
    if said == {"enum"} and isinstance(names["enum"], list):
        allowed = [name for name in names["enum"] if isinstance(name, str)]
        more: Schema = {"properties": {name: properties.get(name, others) for name in allowed}}
    elif said == {"pattern"} and not properties and isinstance(names["pattern"], str):
        more = {"patternProperties": {names["pattern"]: others}}
    elif said and said <= {"minLength", "maxLength"} and not properties and all(map(_is_length, map(names.get, said))):
        more = {"patternProperties": {f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$": others}}
    elif not said:
        del schema["propertyNames"]
        return []
    else:
        return []
    del schema["propertyNames"]
    schema |= {**more, "additionalProperties": False}
    return []


_RULES: tuple[Callable[[Schema, _Whole], list[Schema]], ...] = (
    _pattern, _one_of, _dependencies, _not, _if, _property_names,
)  # fmt: skip


def _negated(part: Any, base: Schema, whole: _Whole, depth: int = 0) -> Schema | None:
    """What holds, of the values that ``base`` allows, for those for which ``part`` does not; None where that is not
    known."""
    part, base = _referred(part, whole.root), _referred(base, whole.root)
    whole.negated -= 1
    if not isinstance(part, dict) or not isinstance(base, dict) or depth > _DEEPEST or whole.negated < 0:
        return None
    said = part.keys() - _REMARKS
    if "type" in said and len(said) > 1 and part["type"] == base.get("type"):
        said = said - {"type"}
    if said and said <= {"required", "properties"}:
        return _negated_object(part, base, whole, depth)
    if said == {"anyOf"} and isinstance(part["anyOf"], list):
        parts = [_negated(one, base, whole, depth + 1) for one in part["anyOf"]]
        known = [one for one in parts if one is not None]
        return {"allOf": known} if known and len(known) == len(parts) else None
    try:
        if said == {"pattern"} and isinstance(part["pattern"], str):
            return {"type": "string", "pattern": whole.complement(part["pattern"])}
        if said == {"const"} or (said == {"enum"} and isinstance(part["enum"], list)):
            return _other_values([part["const"]] if "const" in said else part["enum"], base, whole)
    except NotWritten:
        pass
    return None


def _negated_object(part: Schema, base: Schema, whole: _Whole, depth: int) -> Schema | None:
    required, properties = _names(part.get("required", [])), part.get("properties", {})
    if required is None or not isinstance(properties, dict):
        return None
    found: list[Schema] = [{"properties": {name: False}} for name in sorted(required)]
    known = base.get("properties")
    for name, value in properties.items():
        other = _negated(value, known.get(name, {}) if isinstance(known, dict) else {}, whole, depth + 1)
        if other is None:
            return None
        found.append({"required": [name], "properties": {name: other}})
    return {"type": "object", "anyOf": found}


def _other_values(values: list[Any], base: Schema, whole: _Whole) -> Schema | None:
    """Of a base's values all but these. Raises NotWritten."""
    listed = (
        [False, True]
        if base.get("type") == "boolean"
        else base.get("enum", [base["const"]] if "const" in base else None)
    )
    if isinstance(listed, list):
        gone = {json.dumps(value, sort_keys=True) for value in values}
        if any(isinstance(value, list | dict) for value in values) or any(map(_is_float, [*values, *listed])):
            return None  # equal in other words, perhaps
        return {"enum": [value for value in listed if json.dumps(value, sort_keys=True) not in gone]}
    if base.get("type") == "string":
        texts = [value for value in values if isinstance(value, str)]
        pattern = whole.complement(f"^(?:{'|'.join(map(re.escape, texts))})$") if texts else ""
        return {"type": "string", "pattern": pattern}
    return None


def _is_float(value: Any) -> bool:
    return isinstance(value, float)


def _is_length(value: Any) -> bool:
    return type(value) is int and value >= 0


def _names(value: Any) -> frozenset[str] | None:
    """Those of a list of names."""
    return frozenset(value) if isinstance(value, list) and all(isinstance(name, str) for name in value) else None


def _referred(schema: Any, root: Schema, depth: int = 0) -> Any:
    """The schema itself, or what it refers to and says nothing besides."""
    if not isinstance(schema, dict) or schema.keys() - _REMARKS != {"$ref"} or depth > _DEEPEST:
        return schema
    at: Any = root
    reference = schema["$ref"]
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return schema
    for step in reference[2:].split("/") if len(reference) > 1 else ():
        at = at.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(at, dict) else None
    return schema if at is None else _referred(at, root, depth + 1)


def _types(schema: Any, root: Schema) -> frozenset[str]:
    """The types that a schema's values may have; all of them where it does not say."""
    schema = _referred(schema, root)
    kinds = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kinds, str):
        kinds = [kinds]
    if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
        return frozenset("number" if kind == "integer" else kind for kind in kinds)
    if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
        return frozenset(_kinds(schema["enum"]))
    return (
        frozenset(_kinds([schema["const"]]))
        if isinstance(schema, dict) and "const" in schema
        else frozenset(_FOUND.values())
    )


def _kinds(values: Iterable[Any]) -> Iterable[str]:
    return (_FOUND[type(value)] for value in values)
