"""Which schemas with ``uniqueItems`` are served: those of which it is certain that every array can be filled."""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from inference_svc.structured_output.schema_normalize import plain
from inference_svc.unique.places import Place, Places, Schema
from inference_svc.unique.scan import Mode, Scan, start
from inference_svc.unique.search import way_on

# For all arrays of a schema together, and what compiling one of them counts as: a second or two.
_MOST_STEPS, _COMPILING = 100_000, 2_000


def places_of(schema: Schema, by_bytes: LLTokenizer) -> Places:
    """The places of a schema in which ``uniqueItems`` is kept to. Raises ValueError where that cannot be promised."""
    places, left = Places(schema), _MOST_STEPS
    for place in places.all():
        if place.unique:
            left -= _check(place, places.root, by_bytes, left)
    return places


def _check(place: Place, root: Schema, by_bytes: LLTokenizer, most: int) -> int:
    """Whatever items an array begins with, as many as it must have can be different: so it is if any are, because
    every item may be what every other one may. Returns the steps that it took to see that, ``most`` at most."""
    if place.listed_values:
        raise ValueError("uniqueItems beside an enum or a const of arrays; leave one of them out")
    least, plenty = place.least, place.plenty  # which is counted now, once, and not when several threads ask
    if least <= 1 or (not place.mixed and plenty >= least):
        return 0
    if place.mixed:
        raise ValueError(
            f"uniqueItems with {least} items at least, where what an item may be depends on its place or on several"
            " subschemas; allow for one item, or say of all items the same"
        )
    if most <= _COMPILING:
        raise ValueError("uniqueItems of too many arrays with two items or more; leave some of them out")
    shared: Schema = {key: root[key] for key in ("$schema", "$defs", "definitions") if key in root}
    alone: Schema = {**shared, **place.arrays[0], "x-guidance": {"whitespace_flexible": False}}
    source = LLMatcher.grammar_from_json_schema(plain(alone, unique=False))
    grammar = LLMatcher(by_bytes, source, log_level=0, limits=LLParserLimits(verbose_errors=False))

    def filled(state: Scan) -> bool:
        if state.top is None:
            return state.mode is Mode.AFTER  # that it may end says that they are enough
        return state.top.depth == 0 and state.top.size >= least

    way, steps = (b"", 0) if grammar.is_error() else way_on(grammar, start(Places(alone).start), most, filled)
    if not way:
        raise ValueError(f"uniqueItems with {least} items at least, and so many that are different were not found")
    return steps + _COMPILING
