"""Which node has how much of a prompt: asked, not remembered, so that it is so whoever restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
from kvsidecar.errors import InvalidRequest, Unavailable, UnknownModel
from prometheus_client import Histogram

from inference_svc.gateway.fleet.discovery import BROKEN, NONSENSE, Members, Node
from inference_svc.gateway.fleet.fleet_router import Beginnings, beginnings, candidates, choose
from inference_svc.gateway.fleet_api import HELD, WARM

RESPONSES = "/v1/responses"
_PROMPTS = frozenset({"/v1/chat/completions", "/v1/completions", RESPONSES, WARM})
# Who says nothing in this time has nothing; the prompt is not kept waiting.
_PATIENCE_SECONDS = 0.5
# What is shorter is as quickly computed as asked for.
_WORTH_ASKING_BYTES = 256
# Names of responses have some 40 characters, and everybody is asked.
_MOST_NAME = 200
# Asked at once: each is a connection, and a descriptor.
_MOST_ASKED = 256


@dataclass(frozen=True)
class Asked:
    """What of a request decides where it goes. ``before`` is the response that it goes on from, ``only`` the one node
    that can answer it, and ``wait_seconds`` how long its client wants to wait for a worker at most."""

    path: str
    raw: bytes
    model: str
    prompt: Beginnings
    before: str | None = None
    skips_cache: bool = False
    within_seconds: float | None = None
    only: Node | None = None
    wait_seconds: float | None = None


def to_place(path: str, raw: bytes, body: Any) -> Asked:
    """What decides where a body goes that is not checked yet. Raises InvalidRequest."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    model, before, within = body.get("model"), body.get("previous_response_id"), body.get("within_seconds")
    return Asked(
        path,
        raw,
        model if isinstance(model, str) else "",  # the node says what is wrong
        beginnings(body),
        before if path == RESPONSES and isinstance(before, str) else None,
        body.get("skip_cache") is True,
        within if isinstance(within, int | float) else None,
    )


@dataclass(frozen=True)
class _Held:
    """A node's own word on a prompt."""

    node: Node
    prompt_tokens: int
    held_tokens: int


class Asking:
    """Chooses nodes. ``seconds`` observes how long the asking takes."""

    def __init__(self, members: Members, client: httpx.AsyncClient, seconds: Histogram) -> None:
        self._members, self._client, self._seconds = members, client, seconds
        self._room = asyncio.Semaphore(_MOST_ASKED)

    async def found(self, asked: Asked) -> Asked:
        """The same, with the one node that can answer it. Raises UnknownModel, Unavailable."""
        self.check_model(asked.model)
        return asked if asked.before is None else replace(asked, only=await self.holder(asked.before))

    def check_model(self, name: str) -> None:
        """Raises UnknownModel, Unavailable."""
        served = self._members.models()
        if name and name not in served:
            if any(name in node.models for node in self._members.all):
                raise Unavailable(f"no node that serves {name[:80]!r} is up; try again in a moment")
            raise UnknownModel.among(name, sorted(served))

    async def place(self, asked: Asked, excluded: Sequence[Node]) -> Node:
        """The node for a request. Raises Unavailable when there is none."""
        able = self._able(asked, excluded)
        if asked.only is not None and not able:
            raise Unavailable("the node that keeps the response before this one is away; send all messages instead")
        if not able:
            raise self._members.none()
        if len(able) == 1:
            return able[0]
        named = {node.url: node for node in able}
        near = candidates(self._members.ring, [node.standing() for node in able], asked.prompt)
        found = await self._ask([named[one.name] for one in near], asked)
        standings = [one.node.standing(one.held_tokens) for one in found]
        return named[choose(standings, asked.prompt, max(one.prompt_tokens for one in found)).name]

    def has_another(self, asked: Asked, excluded: Sequence[Node]) -> bool:
        """Whether a node that was not tried yet is up for a request."""
        return bool(self._able(asked, excluded))

    def _able(self, asked: Asked, excluded: Sequence[Node]) -> list[Node]:
        able = [node for node in self._members.alive if node.serves(asked.model) and node not in excluded]
        return able if asked.only is None else [node for node in able if node is asked.only]

    async def _ask(self, nodes: list[Node], asked: Asked) -> list[_Held]:
        short = asked.prompt.size_bytes < _WORTH_ASKING_BYTES
        if short or asked.path not in _PROMPTS or asked.skips_cache:
            return [_Held(node, 0, 0) for node in nodes]
        began = time.perf_counter()
        found = await asyncio.gather(*(self._held(node, asked) for node in nodes))
        self._seconds.observe(time.perf_counter() - began)
        return found

    async def _held(self, node: Node, asked: Asked) -> _Held:
        """Nothing, where a node does not answer in time or refuses the request: it will say why when it gets it."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS), self._room:
                answer = await self._client.post(
                    node.url + HELD + asked.path,
                    content=asked.raw,
                    headers={"Content-Type": "application/json"},
                    extensions=node.extensions,
                )
            found = answer.raise_for_status().json()
            node.busy = int(found.get("busy", 0))
            return _Held(node, int(found["prompt_tokens"]), int(found["held_tokens"]))
        except (TimeoutError, *BROKEN, *NONSENSE):
            return _Held(node, 0, 0)

    async def holder(self, response_id: str) -> Node | None:
        """The node that keeps a response; None when none says so."""
        if (
            len(response_id) > _MOST_NAME
            or not response_id.isascii()
            or not response_id.replace("_", "").replace("-", "").isalnum()
        ):
            return None  # no id of ours, and no path
        nodes = self._members.alive
        kept = await asyncio.gather(*(self._keeps(node, response_id) for node in nodes))
        return next((node for node, keeps in zip(nodes, kept, strict=True) if keeps), None)

    async def _keeps(self, node: Node, response_id: str) -> bool:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS), self._room:
                answer = await self._client.get(f"{node.url}{RESPONSES}/{response_id}", extensions=node.extensions)
        except (TimeoutError, *BROKEN):
            return False
        return answer.status_code == 200
