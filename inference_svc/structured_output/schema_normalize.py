"""JSON schemas without what changes nothing, for a compiler that refuses whatever it does not know.

What goes is without effect by the specification (https://json-schema.org/draft/2020-12/json-schema-validation): formats
that it does not define, which are remarks of those who defined them, and ``uniqueItems`` that is false. One that is
true is kept to by ``inference_svc.unique``, and goes only where that stands behind the grammar.
"""

from __future__ import annotations

import re
from typing import Any

FORMATS = frozenset(
    "date-time time date duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference"
    " uuid uri-template json-pointer relative-json-pointer regex".split()
)
# What stands under these keywords is a schema, a list of schemas, or has them under names of its own.
SCHEMAS = frozenset(
    "items additionalItems prefixItems additionalProperties unevaluatedItems unevaluatedProperties anyOf allOf"
    " oneOf".split()
)
NAMED = frozenset("properties patternProperties $defs definitions".split())
# Under these too, but they do not say what stands at a place by themselves.
_ELSEWHERE = frozenset("contains propertyNames not if then else".split())
_NAMED_ELSEWHERE = frozenset("dependentSchemas dependencies".split())
_DRAFT = re.compile(r"https?://json-schema\.org/(draft-0[4-7])/schema#?")


def plain(schema: Any, unique: bool = True) -> Any:
    """A schema that allows the same, or without ``unique`` also arrays with duplicates. Other values, which may stand
    where a schema should, stay as they are."""
    if isinstance(schema, list):
        return [plain(part, unique) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        unknown = key == "format" and isinstance(value, str) and value not in FORMATS
        if unknown or (key == "uniqueItems" and (value is False or (value is True and not unique))):
            continue
        if key in _ELSEWHERE:
            value = plain(value)
        elif key in SCHEMAS:
            value = plain(value, unique)
        elif key in NAMED | _NAMED_ELSEWHERE and isinstance(value, dict):
            value = {name: plain(part, unique or key not in NAMED) for name, part in value.items()}
        elif key == "$schema" and isinstance(value, str) and (draft := _DRAFT.fullmatch(value)):
            value = f"http://json-schema.org/{draft[1]}/schema#"  # its name, however it was written
        out[key] = value
    return out
