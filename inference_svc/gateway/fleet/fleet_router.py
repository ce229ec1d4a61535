"""Routes prompts to nodes by cached-prefix length and load.

The node with the longest cached prefix gets the prompt, unless its load outweighs that prefix. The gateway keeps no
routing state and decides only by the nodes' reports, so all gateways of a fleet decide alike.

In a small fleet the gateway queries every node for its cached prefix. In a large fleet it queries only the nodes to
which a hash ring maps the prompt's prefix hashes. Every gateway maps prompts with a common prefix to the same nodes.
The turns of one conversation have a common prefix, too.

``worker_router`` also routes by prefix and load, but among the workers of one node, which share a cache. Unlike this
module, it remembers which worker last processed a prefix.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inference_svc.gateway.anthropic_api.content_blocks import without_billing_header
from inference_svc.gateway.fleet.hash_ring import HashRing, hash_point

MAX_QUERY_ALL_NODES = 16
"""A fleet of at most this many nodes is small: the gateway queries every node."""
MAX_LOAD_DIFFERENCE = 4.0
"""A node that has the whole prompt cached may have this many more requests per worker than the least busy node."""
_FIRST_PREFIX_BYTES = 256  # hashed prefixes of the text have this length, twice this length, four times…
_MAX_MESSAGE_PREFIXES = 4  # a conversation also has prefixes of its first parts


@dataclass(frozen=True)
class RouteCandidate:
    """A node that may get a prompt.

    ``load`` is the node's requests per worker. ``cached_tokens`` is the number of the prompt's tokens in its cache.
    """

    name: str
    load: float
    cached_tokens: int = 0


@dataclass(frozen=True)
class PromptPrefixHashes:
    """Hashes of a prompt's prefixes, the shortest first.

    Equal prefixes of the same tenant have equal hashes. ``session_key`` breaks ties; it identifies the conversation or,
    without one, the whole prompt. ``size_bytes`` is the length of the prompt's text.
    """

    digests: tuple[bytes, ...]
    session_key: bytes
    size_bytes: int


def prompt_prefix_hashes(body: dict[str, Any]) -> PromptPrefixHashes:
    """Hash the prefixes of a request body's prompt.

    The caller need not validate the body first: an invalid body also gets hashes, and the node then refuses it.
    """
    parts, talk = _parts(body)
    digest = hashlib.sha256(_bytes([body.get("cache_salt") or ""]))
    found: list[bytes] = []
    at, edge, session_key = 0, _FIRST_PREFIX_BYTES, b""
    for i, part in enumerate(parts):
        data = _bytes(part)
        while at + len(data) >= edge:
            head, data = data[: edge - at], data[edge - at :]
            digest.update(head)
            at, edge = edge, edge * 2
            found.append(digest.digest())
        digest.update(data)
        at += len(data)
        if talk and i < _MAX_MESSAGE_PREFIXES:
            found.append(digest.digest())
        if not session_key and talk and isinstance(part, dict) and part.get("role") == "user":
            session_key = digest.digest()
    whole = digest.digest()
    if isinstance(key := body.get("prompt_cache_key"), str) and key:
        session_key = hashlib.sha256(_bytes(["prompt_cache_key", body.get("cache_salt") or "", key])).digest()
        found.append(session_key)
    return PromptPrefixHashes(tuple(dict.fromkeys(found)) or (whole,), session_key or whole, at)


def _parts(body: dict[str, Any]) -> tuple[list[Any], bool]:
    """Return a prompt's parts in the order in which chat templates write them, and whether it is a conversation."""
    head = [part for part in (body.get("tools"), body.get("instructions"), *_system(body.get("system"))) if part]
    said = body.get("messages", body.get("input"))
    if isinstance(said, list):
        return [*head, *said], True
    if said is not None:
        return [*head, {"role": "user", "content": said}], True
    return [body.get("prompt", "")], False


def _system(system: Any) -> list[str]:
    """Return the texts of Anthropic's ``system``, without Claude Code's header, which changes with every request."""
    parts = system if isinstance(system, list) else [{"text": system}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return [without_billing_header(text) for text in texts if isinstance(text, str)]


def _bytes(part: Any) -> bytes:
    if isinstance(part, str):
        return part.encode("utf-8", "surrogatepass")
    return json.dumps(part, sort_keys=True, separators=(",", ":")).encode()


def nodes_to_query(
    ring: HashRing, standings: Sequence[RouteCandidate], prompt: PromptPrefixHashes
) -> list[RouteCandidate]:
    """Return the nodes to query.

    In a small fleet, these are all nodes. In a large fleet, they are the nodes to which the ring maps the prompt's
    hashes, and the least busy node.
    """
    if len(standings) <= MAX_QUERY_ALL_NODES:
        return list(standings)
    able = {standing.name: standing for standing in standings}
    names = [ring.first(digest, able) for digest in prompt.digests]
    least = min(one.load for one in standings)
    idle = _rendezvous_choice([one for one in standings if one.load == least], prompt)
    return [able[name] for name in dict.fromkeys([*names, idle.name])]


def choose_node(standings: Sequence[RouteCandidate], prompt: PromptPrefixHashes, prompt_tokens: int) -> RouteCandidate:
    """Return the best of one or more candidates.

    A node with the whole prompt cached may have ``MAX_LOAD_DIFFERENCE`` more requests per worker than the others. A
    node with a part of the prompt cached may have a proportional share of this difference.
    """
    worth = MAX_LOAD_DIFFERENCE / max(1, prompt_tokens)
    scores = [one.load - worth * one.cached_tokens for one in standings]
    best = min(scores)
    tied = [one for one, score in zip(standings, scores, strict=True) if score == best]
    return tied[0] if len(tied) == 1 else _rendezvous_choice(tied, prompt)


def _rendezvous_choice(standings: Sequence[RouteCandidate], prompt: PromptPrefixHashes) -> RouteCandidate:
    """Break a tie by rendezvous hashing of node name and prompt, so that every gateway makes the same choice."""
    return min(standings, key=lambda one: hash_point(prompt.session_key + one.name.encode()))
