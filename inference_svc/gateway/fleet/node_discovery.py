"""Discovers the nodes of a fleet and polls their health every second."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import structlog
from kvsidecar.errors import Unavailable
from kvsidecar.net.addresses import TcpAddress

from inference_svc.gateway.fleet.fleet_router import RouteCandidate
from inference_svc.gateway.fleet.hash_ring import HashRing
from inference_svc.gateway.fleet.node_addresses import NodeAddress
from inference_svc.gateway.fleet_api import SERVING_PATH
from inference_svc.gateway.model_aliases import lists

log = structlog.get_logger("gateway")

_POLL_SECONDS, _WAITING_POLL_SECONDS = 1.0, 0.1
_RESOLVE_SECONDS = 5.0
_MAX_TIMEOUTS = 3


# Errors of a failed connection. If TLS refuses a certificate after the handshake, httpx raises ssl.SSLError.
CONNECTION_ERRORS = (httpx.HTTPError, ssl.SSLError)
# Errors while parsing an answer that is not a node's, such as an answer of a proxy or of another service.
BAD_RESPONSE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class NodeFailed(Exception):
    """The node did not answer, or was not reachable. A retry on another node may succeed."""


@dataclass(eq=False)
class Node:
    """State of one node. ``url`` is its address, and ``host`` is the name in its certificate."""

    url: str
    host: str
    timeout_seconds: float
    alive: bool = False
    was_up: bool = False  # the node was alive at least once
    starting: bool = False  # the node has no worker, and reports that it is starting one
    removed: bool = False  # the DNS name no longer resolves to the node
    named: NodeAddress | None = None  # the DNS name that resolved to it
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    workers: int = 1
    busy: int = 0  # the node's running requests of all senders; a node reports this number only to an operator's key
    in_flight: int = 0  # this gateway's own requests to the node
    why: str = "it has not answered yet"
    _num_timeouts: int = 0
    _is_due: asyncio.Event = field(default_factory=asyncio.Event)
    _waiting: set[asyncio.Timeout] = field(default_factory=set)

    def route_candidate(self, held_tokens: int = 0) -> RouteCandidate:
        return RouteCandidate(self.url, max(self.busy, self.in_flight) / self.workers, held_tokens)

    def serves(self, model: str) -> bool:
        return self.alive and not self.removed and (not model or lists(self.models, model))

    @property
    def extensions(self) -> dict[str, Any]:
        """Extensions of an httpx request: the server name for TLS."""
        return {"sni_hostname": self.host}

    @contextmanager
    def counting_request(self) -> Iterator[None]:
        """Count a request while the node processes it."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def wait_for(self, waited: Any, deadline: float) -> Any:
        """Await an answer of the node until ``deadline`` (loop time), or until polling finds that the node failed.

        Raises NodeFailed, TimeoutError.
        """
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                self._waiting.add(timeout)
                try:
                    return await waited
                finally:
                    self._waiting.discard(timeout)
        except TimeoutError:
            if asyncio.get_running_loop().time() < deadline:
                raise NodeFailed(self.why) from None
            raise

    def poll_soon(self) -> None:
        """End the wait for the next poll."""
        self._is_due.set()

    async def wait_for_poll(self) -> None:
        """Wait until the next poll is due."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL_SECONDS if self.alive else _WAITING_POLL_SECONDS):
                await self._is_due.wait()
        self._is_due.clear()

    async def poll(self, client: httpx.AsyncClient) -> None:
        """Query the node's serving status, and update this state."""
        try:
            async with asyncio.timeout(self.timeout_seconds):
                answer = await client.get(self.url + SERVING_PATH, extensions=self.extensions)
        except (TimeoutError, httpx.TimeoutException):
            self._num_timeouts += 1
            self.down(f"it did not answer within {self.timeout_seconds:g} s")
            if self._num_timeouts >= _MAX_TIMEOUTS:
                self._cancel_waiters()
        except CONNECTION_ERRORS as error:
            self._num_timeouts = 0
            self.down(str(error) or type(error).__name__)
        else:
            self._num_timeouts = 0
            self._read_status(answer)

    def _read_status(self, answer: httpx.Response) -> None:
        try:
            found = answer.raise_for_status().json()
            models = {model["id"]: model for model in found["models"]}
            workers, busy = int(found["workers"]), int(found.get("busy", 0))
            starting = found.get("starting") is True
        except httpx.HTTPStatusError:
            hint = "; give its key as KVSIDECAR_GATEWAY_NODE_KEY" if answer.status_code == 401 else ""
            self.down(f"it answers {answer.status_code}{hint}")
            return
        except BAD_RESPONSE_ERRORS:
            self.down("what answers is no gateway of a node")
            return
        if workers < 1:
            self.down("none of its workers is up")
            self.starting = starting
            return
        self.models, self.workers, self.busy = models, workers, busy
        if not self.alive:
            log.info("node is up", node=self.url, models=sorted(models))
        self.alive = self.was_up = True
        self.starting = False

    def down(self, why: str) -> None:
        """Mark the node as down: it gets no requests until it answers a poll again."""
        if self.alive or why != self.why:
            log.warning("node is down", node=self.url, error=why)
        self.alive, self.starting, self.why = False, False, why

    def _cancel_waiters(self) -> None:
        """Fail all requests that wait for an answer of this node."""
        now = asyncio.get_running_loop().time()
        for timeout in list(self._waiting):
            with suppress(RuntimeError):  # the waiter's own deadline expires at the same moment
                timeout.reschedule(now)


class NodeDiscovery:
    """Tracks the nodes of a fleet. The caller owns ``client``."""

    def __init__(self, places: list[NodeAddress], client: httpx.AsyncClient, timeout_seconds: float) -> None:
        self._places, self._client, self._timeout_seconds = places, client, timeout_seconds
        self._nodes = {str(p): Node(str(p), p.host, timeout_seconds) for p in places if not p.every}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.ring = HashRing(self._nodes)

    @property
    def all(self) -> list[Node]:
        return [node for node in self._nodes.values() if not node.removed]

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.all if node.alive]

    def models(self) -> dict[str, dict[str, Any]]:
        """Return the models that live nodes serve, by name. Raises Unavailable when no node is up."""
        found = {name: model for node in self.alive for name, model in node.models.items()}
        if not found:
            raise self.none_up()
        return found

    def none_up(self) -> Unavailable:
        """Return the error for a fleet without a live node."""
        if any(node.was_up for node in self.all):
            return Unavailable("no node of the fleet is up; try again in a moment")
        return Unavailable("no node of the fleet is ready yet; try again in a moment")

    async def start(self) -> None:
        by_name = [place for place in self._places if place.every]
        await asyncio.gather(*(self._resolve(place) for place in by_name))
        await asyncio.gather(*(node.poll(self._client) for node in self.all))
        for node in self.all:
            self._start_polling(node)
        for place in by_name:
            self._tasks[f"names of {place}"] = asyncio.create_task(self._keep_resolving(place))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _start_polling(self, node: Node) -> None:
        if node.url not in self._tasks or self._tasks[node.url].done():
            self._tasks[node.url] = asyncio.create_task(self._poll(node))

    async def _poll(self, node: Node) -> None:
        """Poll the node until it is removed and has no requests of this gateway."""
        while not node.removed or node.in_flight:
            await node.wait_for_poll()
            await node.poll(self._client)
        del self._nodes[node.url], self._tasks[node.url]  # a cluster rarely reuses a pod's address

    async def _keep_resolving(self, place: NodeAddress) -> None:
        while True:
            await asyncio.sleep(_RESOLVE_SECONDS)
            await self._resolve(place)
            for node in self.all:
                self._start_polling(node)

    async def _resolve(self, place: NodeAddress) -> None:
        """Resolve a DNS name and update its nodes. After a failed lookup, the known nodes stay."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            log.warning("a name cannot be resolved; keeping its known nodes", name=place.host, error=str(error))
            return
        now = {f"{place.scheme}://{TcpAddress(str(address[0]), place.port)}" for *_, address in found}
        for url in now:
            node = self._nodes.setdefault(url, Node(url, place.host, self._timeout_seconds, named=place))
            node.removed = False
        for node in self._nodes.values():
            if node.named == place and node.url not in now:
                node.removed = True
        self.ring = HashRing(node.url for node in self.all)
