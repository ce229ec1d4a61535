"""JSON schema clean-up: removes keywords without effect that llguidance would refuse.

By the specification (https://json-schema.org/draft/2020-12/json-schema-validation) three things have no effect: a
``format`` that the specification does not define, ``uniqueItems: false``, and the spelling of ``$schema``. llguidance
supports every other keyword, or refuses it by name.
"""

from __future__ import annotations

import re
from typing import Any

FORMATS = frozenset(
    "date-time time date duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference"
    " uuid uri-template json-pointer relative-json-pointer regex".split()
)
# The value of each of these keywords is a schema or a list of schemas.
_SCHEMAS = frozenset(
    "items additionalItems prefixItems additionalProperties unevaluatedItems unevaluatedProperties anyOf allOf oneOf"
    " contains propertyNames not if then else".split()
)
# The value of each of these keywords is an object whose values are schemas.
_NAMED_SCHEMAS = frozenset("properties patternProperties $defs definitions dependentSchemas dependencies".split())
_DRAFT = re.compile(r"https?://json-schema\.org/(draft-0[4-7])/schema#?")
_NEWER_DRAFT = re.compile(r"https?://json-schema\.org/draft/20(19-09|20-12)/schema#?")


def plain(schema: Any) -> Any:
    """Return a cleaned schema that allows the same values. A value that is not a schema is returned unchanged."""
    if isinstance(schema, list):
        return [plain(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    out = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        if key == "uniqueItems" and value is False:
            continue
        if key == "$schema" and isinstance(value, str):
            draft = _DRAFT.fullmatch(value)
            if draft is None and not _NEWER_DRAFT.fullmatch(value):
                continue  # an unknown version of JSON Schema, which llguidance would try to fetch
            value = f"http://json-schema.org/{draft[1]}/schema#" if draft else value  # the only spelling for llguidance
        elif key in _SCHEMAS:
            value = plain(value)
        elif key in _NAMED_SCHEMAS and isinstance(value, dict):
            value = {name: plain(part) for name, part in value.items()}
        out[key] = value
    return out


def keyword_of_pattern(schema: Any, pattern: str) -> str:
    """Return the keyword of a schema that contains a regular expression: pattern or patternProperties."""
    due = [schema]
    while due:
        found = due.pop()
        if isinstance(found, dict):
            named = found.get("patternProperties")
            if isinstance(named, dict) and pattern in named:
                return "patternProperties"
            due += found.values()
        elif isinstance(found, list):
            due += found
    return "pattern"
