"""Queries candidate nodes for the length of their cached prefix, and chooses a node.

The gateway keeps no routing state, so a restart of a node or gateway makes nothing stale.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from kvsidecar.errors import InvalidRequest, Unavailable, UnknownModel
from prometheus_client import Histogram

from inference_svc.gateway.anthropic_api.error_envelope import MESSAGES_PATH
from inference_svc.gateway.fleet.fleet_router import (
    PromptPrefixHashes,
    choose_node,
    nodes_to_query,
    prompt_prefix_hashes,
)
from inference_svc.gateway.fleet.node_discovery import BAD_RESPONSE_ERRORS, CONNECTION_ERRORS, Node, NodeDiscovery
from inference_svc.gateway.fleet_api import CACHED_PREFIX_PATH, INVOCATIONS_PATH, PIN_PATH, WARM_PATH
from inference_svc.gateway.model_aliases import lists

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
INPUT_TOKENS = f"{RESPONSES}/input_tokens"
PROMPT_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", RESPONSES, MESSAGES_PATH, WARM_PATH, PIN_PATH})
"""Paths of requests with a prompt, for which the gateway queries the nodes' caches."""
# A node that does not answer within this time counts as a node without a cached prefix: the prompt must not wait.
_TIMEOUT_SECONDS = 0.5
# A node computes a shorter prompt about as fast as a query takes, so the gateway sends no query.
_MIN_QUERY_BYTES = 256
# A real response id has about 40 characters. The limit bounds the queries that a forged id causes at every node.
_MAX_RESPONSE_ID_CHARS = 200
# The limit bounds file descriptors: each concurrent query has its own connection.
_MAX_CONCURRENT_QUERIES = 256


@dataclass(frozen=True)
class RoutedRequest:
    """The properties of a request that determine its node.

    ``before`` is the id of the response or conversation that the request continues. ``only`` is the node that stores
    ``before``; no other node can answer. ``refers_to_items`` says that the input refers to stored items; a node without
    them refuses the request. ``within_seconds`` is the deadline in the body. ``wait_seconds`` is the
    client's limit for the wait for a worker. ``headers`` are the headers of the forwarded request.
    """

    path: str
    raw: bytes
    model: str
    prompt: PromptPrefixHashes
    before: str | None = None
    skips_cache: bool = False
    within_seconds: float | None = None
    only: Node | None = None
    wait_seconds: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    refers_to_items: bool = False


def to_routed_request(path: str, raw: bytes, body: Any) -> RoutedRequest:
    """Extract the routing properties of an unvalidated body. Raises InvalidRequest."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    if path == INVOCATIONS_PATH:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    model, before, within = body.get("model"), body.get("previous_response_id"), body.get("within_seconds")
    if before is None:
        named = body.get("conversation")
        before = named.get("id") if isinstance(named, dict) else named
    return RoutedRequest(
        path,
        raw,
        model if isinstance(model, str) else "",  # the node reports the error
        prompt_prefix_hashes(body),
        before if path in (RESPONSES, INPUT_TOKENS) and isinstance(before, str) else None,
        body.get("skip_cache") is True,
        within if isinstance(within, int | float) else None,
        refers_to_items=path in (RESPONSES, INPUT_TOKENS) and _has_reference(body.get("input")),
    )


def _has_reference(given: Any) -> bool:
    """Return whether a response's input refers to an item; the type of a reference may be left out."""
    items = given if isinstance(given, list) else ()
    return any(isinstance(item, dict) and "id" in item and item.keys() <= {"type", "id"} for item in items)


@dataclass(frozen=True)
class _CachedPrefix:
    """A node's answer: the number of tokens in the prompt, and in its cached prefix, or that it refuses the prompt."""

    node: Node
    prompt_tokens: int
    held_tokens: int
    refuses: bool = False


class PrefixQuery:
    """Queries nodes and chooses one. The histogram ``seconds`` gets the duration of each round of queries."""

    def __init__(self, discovery: NodeDiscovery, client: httpx.AsyncClient, seconds: Histogram) -> None:
        self._discovery, self._client, self._seconds = discovery, client, seconds
        self._semaphore = asyncio.Semaphore(_MAX_CONCURRENT_QUERIES)

    async def with_owner(self, asked: RoutedRequest) -> RoutedRequest:
        """Return the request with ``only``, the node that stores the response that the request continues.

        Returns a request that continues nothing unchanged. Raises UnknownModel, Unavailable.
        """
        self.check_model(asked.model)
        return asked if asked.before is None else replace(asked, only=await self.node_with_response(asked.before))

    def check_model(self, name: str) -> None:
        """Check that a live node serves the model. Raises UnknownModel, Unavailable."""
        served = self._discovery.models()
        if name and not lists(served, name):
            if any(lists(node.models, name) for node in self._discovery.all):
                raise Unavailable(f"no node that serves {name[:80]!r} is up; try again in a moment")
            raise UnknownModel.among(name, sorted(served))

    async def choose_node(self, asked: RoutedRequest, excluded: Sequence[Node]) -> Node:
        """Choose the node for a request. Raises Unavailable when no node is suitable."""
        able = self._able(asked, excluded)
        if asked.only is not None and not able:
            raise Unavailable("the node that keeps the response before this one is away; send all messages instead")
        if not able:
            raise self._discovery.none_up()
        if len(able) == 1:
            return able[0]
        named = {node.url: node for node in able}
        near = able
        if not asked.refers_to_items:
            candidates = [node.route_candidate() for node in able]
            near = [named[one.name] for one in nodes_to_query(self._discovery.ring, candidates, asked.prompt)]
        found = await self._query(near, asked)
        if asked.refers_to_items:
            found = [one for one in found if not one.refuses] or found
        standings = [one.node.route_candidate(one.held_tokens) for one in found]
        return named[choose_node(standings, asked.prompt, max(one.prompt_tokens for one in found)).name]

    def has_another(self, asked: RoutedRequest, excluded: Sequence[Node]) -> bool:
        """Return whether a node outside of ``excluded`` is up and can answer the request."""
        return bool(self._able(asked, excluded))

    def _able(self, asked: RoutedRequest, excluded: Sequence[Node]) -> list[Node]:
        able = [node for node in self._discovery.alive if node.serves(asked.model) and node not in excluded]
        return able if asked.only is None else [node for node in able if node is asked.only]

    async def _query(self, nodes: list[Node], asked: RoutedRequest) -> list[_CachedPrefix]:
        short = asked.prompt.size_bytes < _MIN_QUERY_BYTES
        if not asked.refers_to_items and (short or asked.path not in PROMPT_PATHS or asked.skips_cache):
            return [_CachedPrefix(node, 0, 0) for node in nodes]
        began = time.perf_counter()
        found = await asyncio.gather(*(self._query_node(node, asked) for node in nodes))
        self._seconds.observe(time.perf_counter() - began)
        return found

    async def _query_node(self, node: Node, asked: RoutedRequest) -> _CachedPrefix:
        """Query one node. A node that refuses, or does not answer in time, counts as 0 cached tokens.

        The reason of a refusal is not needed here: the node reports it again when it gets the request itself.
        """
        # Both paths of a pair have the same body fields.
        path = {PIN_PATH: WARM_PATH, INPUT_TOKENS: RESPONSES}.get(asked.path, asked.path)
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS), self._semaphore:
                answer = await self._client.post(
                    node.url + CACHED_PREFIX_PATH + path,
                    content=asked.raw,
                    headers={"Content-Type": "application/json"},
                    extensions=node.extensions,
                )
            if answer.is_client_error:
                return _CachedPrefix(node, 0, 0, refuses=True)
            found = answer.raise_for_status().json()
            node.busy = int(found.get("busy", 0))
            return _CachedPrefix(node, int(found["prompt_tokens"]), int(found["held_tokens"]))
        except (TimeoutError, *CONNECTION_ERRORS, *BAD_RESPONSE_ERRORS):
            return _CachedPrefix(node, 0, 0)

    async def node_with_response(self, response_id: str) -> Node | None:
        """Return the node that stores a response or conversation; None when no live node does.

        Raises Unavailable if the only nodes that may store it answer too late.
        """
        if (
            len(response_id) > _MAX_RESPONSE_ID_CHARS
            or not response_id.isascii()
            or not response_id.replace("_", "").replace("-", "").isalnum()
        ):
            return None  # this API has no such ids, and the text may be unsafe in a URL path
        nodes = self._discovery.alive
        kept = await asyncio.gather(*(self._keeps(node, response_id) for node in nodes))
        found = next((node for node, keeps in zip(nodes, kept, strict=True) if keeps), None)
        if found is None and None in kept:
            raise Unavailable("a node that may keep the response did not answer in time; try again in a moment")
        return found

    async def _keeps(self, node: Node, response_id: str) -> bool | None:
        """Return whether a node stores a response; None if it does not answer in time."""
        path = CONVERSATIONS if response_id.startswith("conv_") else RESPONSES
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS), self._semaphore:
                answer = await self._client.get(f"{node.url}{path}/{response_id}", extensions=node.extensions)
        except TimeoutError:
            return None
        except CONNECTION_ERRORS:
            return False  # like a node that is down
        return answer.status_code == 200
