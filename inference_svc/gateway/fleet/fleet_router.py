"""Which node gets a prompt: the one that has most of it, unless it is busier than that is worth. Nothing is remembered:
what nodes say decides, so that any number of gateways decide alike.

A few nodes are all asked what they have of a prompt. Of many, only those are that the prompt's beginnings lead to, on a
ring of hashes (Karger et al., "Consistent Hashing and Random Trees", 1997): prompts that begin alike lead to the same
ones, whichever gateway asks, and the later turn of a conversation leads to where the earlier one did.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

ASKED_ALL = 16
"""So many nodes are all asked."""
WORTH = 4.0
"""A node that has the whole prompt may have so many more requests for each of its workers than the least busy one."""
_POINTS = 64  # of each node on the ring: the shares of 100 nodes differ by a tenth or so
_FIRST_BYTES = 256  # beginnings are as long as this, twice this, four times this…
_PARTS = 4  # …and as the first messages of a conversation


@dataclass(frozen=True)
class Standing:
    """A node that may get a prompt. ``load`` is requests per worker, ``held_tokens`` what it has of the prompt."""

    name: str
    load: float
    held_tokens: int = 0


@dataclass(frozen=True)
class Beginnings:
    """Hashes of a prompt's beginnings, shorter ones first; equal beginnings of the same tenant have equal ones.
    ``home`` names the conversation, or the whole of a prompt that is none; it breaks ties. ``size_bytes`` is that of
    the text."""

    digests: tuple[bytes, ...]
    home: bytes
    size_bytes: int


def beginnings(body: dict[str, Any]) -> Beginnings:
    """Of a request's body, checked or not: of what is no prompt, what it looks like."""
    parts, talk = _parts(body)
    digest = hashlib.sha256(_bytes([body.get("cache_salt") or ""]))
    found: list[bytes] = []
    at, edge, home = 0, _FIRST_BYTES, b""
    for i, part in enumerate(parts):
        data = _bytes(part)
        while at + len(data) >= edge:
            head, data = data[: edge - at], data[edge - at :]
            digest.update(head)
            at, edge = edge, edge * 2
            found.append(digest.digest())
        digest.update(data)
        at += len(data)
        if talk and i < _PARTS:
            found.append(digest.digest())
        if not home and talk and isinstance(part, dict) and part.get("role") == "user":
            home = digest.digest()
    whole = digest.digest()
    return Beginnings(tuple(dict.fromkeys(found)) or (whole,), home or whole, at)


def _parts(body: dict[str, Any]) -> tuple[list[Any], bool]:
    """A prompt in the order in which templates write it, and whether it is a conversation."""
    head = [part for part in (body.get("tools"), body.get("instructions")) if part]
    said = body.get("messages", body.get("input"))
    if isinstance(said, list):
        return [*head, *said], True
    if said is not None:
        return [*head, {"role": "user", "content": said}], True
    return [body.get("prompt", "")], False


def _bytes(part: Any) -> bytes:
    if isinstance(part, str):
        return part.encode("utf-8", "surrogatepass")
    return json.dumps(part, sort_keys=True, separators=(",", ":")).encode()


class Ring:
    """Names on a circle of hashes."""

    def __init__(self, names: Iterable[str]) -> None:
        self._points = sorted((_point(f"{name} {i}".encode()), name) for name in set(names) for i in range(_POINTS))

    def first(self, digest: bytes, able: Collection[str]) -> str:
        """The first name behind a hash that is among ``able``, of which one at least is on the ring."""
        begin = bisect.bisect(self._points, (_point(digest), ""))
        for i in range(len(self._points)):
            name = self._points[(begin + i) % len(self._points)][1]
            if name in able:
                return name
        raise ValueError("no name of the ring is able")


def _point(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def candidates(ring: Ring, standings: Sequence[Standing], prompt: Beginnings) -> list[Standing]:
    """Those that are to be asked: all, or of many those that the beginnings lead to and the least busy one."""
    if len(standings) <= ASKED_ALL:
        return list(standings)
    able = {standing.name: standing for standing in standings}
    names = [ring.first(digest, able) for digest in prompt.digests]
    least = min(one.load for one in standings)
    idle = _nearest([one for one in standings if one.load == least], prompt)
    return [able[name] for name in dict.fromkeys([*names, idle.name])]


def choose(standings: Sequence[Standing], prompt: Beginnings, prompt_tokens: int) -> Standing:
    """The best of at least one: a whole prompt is worth ``WORTH`` requests, a part its share of it."""
    worth = WORTH / max(1, prompt_tokens)
    scores = [one.load - worth * one.held_tokens for one in standings]
    best = min(scores)
    tied = [one for one, score in zip(standings, scores, strict=True) if score == best]
    return tied[0] if len(tied) == 1 else _nearest(tied, prompt)


def _nearest(standings: Sequence[Standing], prompt: Beginnings) -> Standing:
    """By a hash of name and prompt, the same everywhere (rendezvous hashing)."""
    return min(standings, key=lambda one: _point(prompt.home + one.name.encode()))
