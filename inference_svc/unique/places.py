"""Places of a JSON schema: what it says of the value at some path of a text, as far as ``uniqueItems`` goes.

A place unites all subschemas that may apply at its path, whichever alternative the text turns out to follow: an array
is kept free of duplicates where any of them says so. That allows less than the schema where alternatives differ in
this, and never more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]
# In place of a value's own keywords, or beside them.
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
# What says nothing of which values there are.
_REMARKS = frozenset(
    "title description default examples deprecated readOnly writeOnly $comment $id $schema $defs definitions"
    " x-guidance uniqueItems insertionOrder".split()
)
# Of these alone it is known how many values they allow.
_COUNTED = {
    "string": frozenset(("minLength", "maxLength")),
    "integer": frozenset(("minimum", "maximum")),
    "object": frozenset(("properties", "required", "additionalProperties")),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}
_MOST_LOOKS = 50_000  # subschemas that are asked for a name or an item, of all places together: a second or less


class Places:
    """The places of one schema; any thread may ask. Raises ValueError for references that are none of its own."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self._known: dict[frozenset[int], Place] = {}
        self._counts: dict[int, float] = {}  # by subschema
        self.start = self.at([root])

    def at(self, schemas: Iterable[Any]) -> Place:
        """The place that all of these may describe."""
        found: dict[int, Schema] = {}
        self._unite(schemas, found)
        return self._known.setdefault(frozenset(found), Place(self, list(found.values())))

    def all(self) -> Iterator[Place]:
        """Every place that a text can come to. Raises ValueError where they are too many: alternatives that refer to
        each other can describe as many as there are sets of them."""
        seen, due, left = {id(self.start)}, [self.start], _MOST_LOOKS
        while due:
            place = due.pop()
            left -= place.looks
            if left < 0:
                raise ValueError("uniqueItems beside too many alternatives that hold together; leave some of them out")
            yield place
            for other in place.below():
                if id(other) not in seen:
                    seen.add(id(other))
                    due.append(other)

    def _unite(self, schemas: Iterable[Any], found: dict[int, Schema]) -> None:
        for schema in schemas:
            if not isinstance(schema, dict) or id(schema) in found:
                continue
            if schema is not self.root and isinstance(schema.get("$id"), str):
                raise ValueError("uniqueItems beside a subschema with an $id of its own; leave one of them out")
            found[id(schema)] = schema
            for key in _ALTERNATIVES:
                self._unite(_list(schema, key), found)
            if "$ref" in schema:
                self._unite([self.referred(schema["$ref"])], found)

    def referred(self, reference: Any) -> Any:
        """What a reference names."""
        at: Any = self.root
        pointer = str(reference)
        if not (pointer == "#" or pointer.startswith("#/")):
            raise ValueError(f"uniqueItems beside the reference {pointer[:80]}; those that begin with #/ are known")
        for step in pointer[2:].split("/") if len(pointer) > 1 else ():
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(at, list) and name.isdecimal() and int(name) < len(at):
                at = at[int(name)]
            elif isinstance(at, dict) and name in at:
                at = at[name]
            else:
                raise ValueError(f"the reference {pointer[:80]} names nothing in the schema")
        return at

    def count(self, schema: Any) -> float:
        """Different values that a schema allows, at least; 0 where that is not known."""
        if schema is True:
            return math.inf
        if not isinstance(schema, dict):
            return 0
        found = self._counts.get(id(schema))
        if found is None:
            self._counts[id(schema)] = 0  # while it is looked for: what refers to itself adds nothing
            found = self._counts[id(schema)] = self._count(schema)
        return found

    def _count(self, schema: Schema) -> float:
        said = schema.keys() - _REMARKS
        if not said:
            return math.inf
        for key in ("anyOf", "oneOf"):
            if said == {key} and isinstance(schema[key], list):
                return max(map(self.count, schema[key]), default=0)
        if said == {"$ref"}:
            return self.count(self.referred(schema["$ref"]))
        kind = schema.get("type")
        if "enum" in said and said <= {"enum", "type"} and isinstance(schema["enum"], list):
            return len({json.dumps(one) for one in schema["enum"] if isinstance(one, str) and kind in (None, "string")})
        if not isinstance(kind, str) or kind not in _COUNTED or not said - {"type"} <= _COUNTED[kind]:
            return 0
        match kind:
            case "boolean" | "null":
                return 2 if kind == "boolean" else 1
            case "string":
                least, most = _number(schema, "minLength", 0), _number(schema, "maxLength", math.inf)
                # All of one character: there are more than a million, without those that are written as others are.
                return math.inf if most == math.inf else 10**5 if least <= most and most > 0 else 0
            case "integer":
                least, most = _number(schema, "minimum", -math.inf), _number(schema, "maximum", math.inf)
                return max(0.0, float(most - least - 1))
            case _:
                return max(map(self.count, _named(schema, "properties").values()), default=0)


class Place:
    """Belongs to its ``Places``; there is one for each set of subschemas."""

    def __init__(self, places: Places, schemas: list[Schema]) -> None:
        self._places, self.schemas = places, schemas
        self._keys: dict[str, Place] = {}
        self._items: dict[int, Place] = {}
        self.unique = any(schema.get("uniqueItems") is True for schema in schemas)

    def key(self, name: str) -> Place:
        """The value under a name."""
        found = self._keys.get(name)
        if found is None:
            found = self._places.at(part for schema in self.schemas for part in _under(schema, name))
            if len(self._keys) < 1024:  # names are the answer's own
                self._keys[name] = found
        return found

    def item(self, index: int) -> Place:
        """The value at an index."""
        index = min(index, self._listed)
        found = self._items.get(index)
        if found is None:
            found = self._items[index] = self._places.at(p for schema in self.schemas for p in _listed(schema, index))
        return found

    @cached_property
    def _names(self) -> list[str]:
        """Members that have subschemas of their own."""
        return sorted({name for schema in self.schemas for name in _named(schema, "properties")})

    @property
    def looks(self) -> int:
        """What it takes to say what is below: how often a subschema is asked."""
        return (2 + len(self._names) + self._listed) * (1 + len(self.schemas))

    def below(self) -> list[Place]:
        """The places of all members and items."""
        other = self._places.at(part for schema in self.schemas for part in _unnamed(schema))
        return [other, *map(self.key, self._names), *(self.item(i) for i in range(self._listed + 1))]

    @property
    def arrays(self) -> list[Schema]:
        """The subschemas that say something of arrays."""
        found = [schema for schema in self.schemas if schema.keys() - _REMARKS - {"$ref", "anyOf", "oneOf"}]
        return [schema for schema in found if schema.get("type") in (None, "array") or "array" in _list(schema, "type")]

    @cached_property
    def plenty(self) -> float:
        """Different items that an array may have, at least; 0 where that is not known."""
        return 0 if self.mixed else self._places.count(self.arrays[0].get("items", True))

    @property
    def least(self) -> int:
        """Items that it must have; the most that any of the subschemas wants."""
        return max((math.ceil(_number(schema, "minItems", 0)) for schema in self.schemas), default=0)

    @property
    def mixed(self) -> bool:
        """What an item may be depends on its index, or on what several subschemas say together."""
        return bool(self._listed) or len(self.arrays) != 1

    @property
    def listed_values(self) -> bool:
        """Arrays are given by their values."""
        values = [v for s in self.arrays for v in (*_list(s, "enum"), s.get("const"))]
        return any(isinstance(value, list) for value in values)

    @cached_property
    def _listed(self) -> int:
        """Leading items that have subschemas of their own."""
        return max((len(part) for schema in self.schemas for part in _tuples(schema)), default=0)


def _number(schema: Schema, key: str, other: float) -> float:
    found = schema.get(key)
    return found if isinstance(found, int | float) else other


def _list(schema: Schema, key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _named(schema: Schema, key: str) -> Schema:
    found = schema.get(key)
    return found if isinstance(found, dict) else {}


def _under(schema: Schema, name: str) -> Iterator[Any]:
    named = _named(schema, "properties")
    if name in named:
        yield named[name]
        yield from _named(schema, "patternProperties").values()
    else:
        yield from _unnamed(schema)


def _unnamed(schema: Schema) -> Iterator[Any]:
    """What may describe members that have no subschema of their own; patterns are not looked at."""
    yield from _named(schema, "patternProperties").values()
    yield schema.get("additionalProperties")
    yield schema.get("unevaluatedProperties")


def _tuples(schema: Schema) -> Iterator[list[Any]]:
    for key in ("prefixItems", "items"):
        if isinstance(schema.get(key), list):
            yield schema[key]


def _listed(schema: Schema, index: int) -> Iterator[Any]:
    listed = next(_tuples(schema), [])
    if index < len(listed):
        yield listed[index]
    else:
        yield schema.get("items")
        yield schema.get("additionalItems")
        yield schema.get("unevaluatedItems")
