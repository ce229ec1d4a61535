"""Cost of prompt layouts: computed tokens in a request log, by cause."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvsidecar.errors import InvalidRequest

_MAX_PLACES, _LAST_TOKEN = 5, "the last token only"
_DIFFERS, _UNREPORTED = "differs", "unreported"


@dataclass
class CauseCost:
    """Requests that computed prompt tokens for one cause."""

    kind: str
    requests: int = 0
    tokens: int = 0
    ttft_ms: float = 0.0
    timed: int = 0

    @property
    def mean_ttft_ms(self) -> float | None:
        return self.ttft_ms / self.timed if self.timed else None


@dataclass
class PlaceCost:
    """Requests whose prompts differ from an earlier prompt from token ``position`` on, in ``part`` of the prompt."""

    position: int
    part: str
    requests: int = 0
    tokens: int = 0

    @property
    def where(self) -> str:
        return f" ({self.part})" if self.part else ""


class LogReplay:
    """Sums over the answers of a gateway's request log, which has no text."""

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.cached_tokens = 0
        self._causes: dict[str, CauseCost] = {}
        self._places: dict[tuple[int, str], PlaceCost] = {}

    @classmethod
    def of_file(cls, path: Path) -> LogReplay:
        """Read a log. Raises InvalidRequest for a file without answers."""
        found = cls()
        try:
            with path.open(encoding="utf-8", errors="replace") as lines:
                found.add(lines)
        except OSError as error:
            raise InvalidRequest(f"cannot read the log {path}: {error.strerror}") from error
        if not found.requests:
            raise InvalidRequest(
                f"{path} has no line of an answered request; give the log of a gateway, or of kvsidecar serve"
            )
        return found

    def add(self, lines: Iterable[str]) -> None:
        """Add the lines of answered requests; ignore all other lines."""
        for line in lines:
            fields = _fields(line)
            prompt, cached = _count(fields, "prompt_tokens"), _count(fields, "cached_tokens")
            if fields.get("event") == "request" and prompt:
                self._add(fields, prompt, min(cached, prompt))

    def _add(self, fields: dict[str, Any], prompt: int, cached: int) -> None:
        computed, answers = prompt - cached, max(1, _count(fields, "answers"))
        self.requests += 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        kind = str(fields.get("miss") or (_UNREPORTED if computed > answers else _LAST_TOKEN))[:40]
        cause = self._causes.setdefault(kind, CauseCost(kind))
        cause.requests += 1
        cause.tokens += computed
        ttft = _number(fields.get("ttft_ms"))
        if ttft is not None:
            cause.ttft_ms += ttft
            cause.timed += 1
        if kind == _DIFFERS:
            key = _count(fields, "miss_at"), str(fields.get("miss_part", ""))[:80]
            place = self._places.setdefault(key, PlaceCost(*key))
            place.requests += 1
            place.tokens += computed

    def by_cost(self) -> list[CauseCost]:
        """Return the causes, the most expensive first."""
        return sorted(self._causes.values(), key=lambda cause: -cause.tokens)

    def costly_places(self) -> list[PlaceCost]:
        """Return the places where several requests differ, the most expensive first."""
        several = (place for place in self._places.values() if place.requests > 1)
        return sorted(several, key=lambda place: -place.tokens)[:_MAX_PLACES]

    def as_dict(self) -> dict[str, Any]:
        """Return the report, for JSON."""
        causes = [
            {"kind": c.kind, "requests": c.requests, "tokens": c.tokens, "mean_ttft_ms": c.mean_ttft_ms}
            for c in self.by_cost()
        ]
        totals = {"prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens}
        places = [asdict(place) for place in self.costly_places()]
        return {"requests": self.requests, **totals, "causes": causes, "places": places}


def _fields(line: str) -> dict[str, Any]:
    """Return the fields of a log line; empty for a line in another format.

    Collectors may write text before the JSON.
    """
    try:
        found = json.loads(line[line.index("{") :])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def _count(fields: dict[str, Any], name: str) -> int:
    """Return a count; 0 for a missing field, and for a value that no gateway writes."""
    found = _number(fields.get(name))
    return int(found) if found is not None and 0 <= found < 2**53 else 0
