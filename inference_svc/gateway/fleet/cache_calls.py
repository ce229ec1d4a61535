"""Calls that concern the caches of several nodes: sessions, pins, cached prefixes, load."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from kvsidecar.errors import KVSidecarError, Unavailable

from inference_svc.gateway.api_keys import ApiKeys
from inference_svc.gateway.body_reader import BodyReader
from inference_svc.gateway.cache_hints import RELEASE_PATH
from inference_svc.gateway.fleet.node_calls import NodeCalls
from inference_svc.gateway.fleet.node_discovery import BAD_RESPONSE_ERRORS, NodeDiscovery
from inference_svc.gateway.fleet.prefix_query import PrefixQuery, RoutedRequest, to_routed_request
from inference_svc.gateway.fleet_api import CACHED_PREFIX_PATH, UNPIN_PATH
from inference_svc.gateway.model_aliases import lists

# Paths of the calls that every node gets. The value is the field of the answer that has the node's number of chunks.
_COUNTED = {RELEASE_PATH: "released_chunks", UNPIN_PATH: "unpinned_chunks"}
EVERYWHERE_PATHS = tuple(_COUNTED)
# Timeout of a call; long, because a node deletes chunks from its disk before it answers.
_CHANGE_SECONDS = 60.0
_NOT_FOUND = 404
# These statuses mean that the node is down, or that it refuses this gateway's key. A client can fix neither.
_FAILED = frozenset({401, 500, 502, 503, 504})


class CacheCalls:
    """Handlers of one fleet gateway."""

    def __init__(
        self, discovery: NodeDiscovery, prefix_query: PrefixQuery, bodies: BodyReader, keys: ApiKeys, calls: NodeCalls
    ) -> None:
        self._discovery, self._prefix_query, self._bodies = discovery, prefix_query, bodies
        self._keys, self._calls = keys, calls

    async def everywhere(self, request: Request) -> Response:
        """Send a call to every node that serves the model, because each of them may have some of the chunks.

        Returns the sum of the nodes' numbers of chunks, or a node's refusal. Raises UnknownModel. Raises Unavailable if
        a node does not answer, or if a node that serves the model is down: its daemon still has its chunks and pins.
        The client may repeat such a call; its answer then counts only the remaining chunks.
        """
        asked, field = await self._read(request, request.url.path), _COUNTED[request.url.path]
        self._prefix_query.check_model(asked.model)
        nodes = [node for node in self._discovery.all if not asked.model or lists(node.models, asked.model)]
        is_one_away = any(node.was_up and not node.alive for node in nodes)
        alive = (node for node in nodes if node.alive)
        sent = (self._calls.send(node, request, asked.raw, _CHANGE_SECONDS) for node in alive)
        answers = await asyncio.gather(*sent, return_exceptions=True)
        done: list[Response] = []
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, KVSidecarError):
                raise answer
            if not isinstance(answer, Response) or answer.status_code in _FAILED:
                raise Unavailable("a node of the fleet does not answer; send this again in a moment")
            done.append(answer)
        refused = [answer for answer in done if answer.status_code != 200]
        is_done = len(refused) < len(done)
        for answer in refused:
            if answer.status_code != _NOT_FOUND:
                return answer
        # Pins are counted, so a repeated unpin would end another pin of the prefix.
        if is_one_away and not (is_done and request.url.path == UNPIN_PATH):
            raise Unavailable("a node of the fleet is down; send this again in a moment")
        if not is_done:
            return refused[0]
        return JSONResponse({field: sum(_count(one, field) for one in done if one.status_code == 200)})

    async def cached_prefix(self, request: Request) -> Response:
        """Answer with the cached prefix of the node that would get the prompt."""
        asked = await self._read(request, request.url.path.removeprefix(CACHED_PREFIX_PATH))
        self._prefix_query.check_model(asked.model)
        node = await self._prefix_query.choose_node(asked, ())
        return await self._calls.send(node, request, asked.raw)

    async def serving_status(self, request: Request) -> Response:
        """Answer as if the fleet were one node with all workers, for a router or another fleet gateway."""
        nodes = self._discovery.all
        alive = [node for node in nodes if node.alive]
        models = {name: model for node in alive for name, model in node.models.items()}
        shown: dict[str, Any] = {
            "models": list(models.values()),
            "workers": sum(node.workers for node in alive),
            "starting": not alive and any(node.starting for node in nodes),
        }
        if self._keys.may_see_load(request.scope):
            shown["busy"] = sum(max(node.busy, node.in_flight) for node in alive)
        return JSONResponse(shown)

    async def _read(self, request: Request, path: str) -> RoutedRequest:
        return await self._bodies.read(request, partial(to_routed_request, path))


def _count(answer: Response, field: str) -> int:
    """Return the number of chunks in a node's answer. Raises Unavailable for an answer without it."""
    try:
        return int(json.loads(bytes(answer.body))[field])
    except BAD_RESPONSE_ERRORS as error:
        raise Unavailable("a node of the fleet answers with something else than a number of chunks") from error
