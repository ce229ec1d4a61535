"""Routes requests to workers by prompt prefix and load.

A prompt goes to the worker that last processed the longest prefix of it. If that worker's load is too high, the prompt
goes to the least busy worker. The workers of a node share the cache daemon, so a wrong choice costs only a load of
chunks, never a prefill. ``fleet.fleet_router`` routes to the nodes of a fleet.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import grpc
import structlog
from kvsidecar.client import AsyncClient
from kvsidecar.errors import (
    Cancelled,
    DeadlineExceeded,
    KVSidecarError,
    RequestTooLarge,
    Unavailable,
    from_rpc,
    sent_error,
)
from kvsidecar.inference.v1 import inference_pb2 as pb

log = structlog.get_logger("gateway")

_BLOCK_BYTES, _MAX_HASHED_BYTES = 256, 256 << 10
_MAX_PREFIXES = 100_000
# A worker with the longest prefix gets the prompt if it has at most this many more requests than the least busy worker.
_MAX_LOAD_DIFFERENCE = 4
# Prefixes that end with a message are hashed for this many messages, however short they are.
_MAX_HASHED_MESSAGES = 64
_POLL_SECONDS, _WAITING_POLL_SECONDS = 1.0, 0.1
# A worker that does not answer a poll within this time is down. A busy machine may delay a healthy worker by seconds.
_POLL_TIMEOUT_SECONDS = 4.0
_CALL_SECONDS = 60.0
# With these options, the gateway notices a worker as soon as it is up. gRPC's default backoff grows with every failed
# attempt: to 9 s while a model loads for 20 s.
RECONNECT = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 300),
)
# A call beyond a connection's limit of calls waits at the client. So polls have a connection of their own: a poll that
# waited behind answers would look like one that the worker does not answer.
_POLL_CONNECTION = (*RECONNECT, ("grpc.use_local_subchannel_pool", 1))


@dataclass(eq=False)
class Worker:
    """The gateway's state of one worker."""

    target: str
    client: AsyncClient
    poll_client: AsyncClient
    alive: bool = False
    down_at: float = 0.0  # monotonic time at which the worker went down
    was_up: bool = False  # the worker was alive at least once
    model: pb.GetModelResponse = field(default_factory=pb.GetModelResponse)
    stats: pb.GetStatsResponse | None = None  # as last reported
    in_flight: int = 0
    refused: set[str] = field(default_factory=set)  # adapters whose load or unload failed here

    @property
    def names(self) -> list[str]:
        """Names that requests may use: the worker's model, and the adapters of the model."""
        return [self.model.model_id, *(adapter.name for adapter in self.model.adapters)]

    def serves(self, name: str) -> bool:
        """Return whether the worker serves the model or adapter of this name; an empty name means any model."""
        return not name or name in self.names

    def namespace(self, name: str) -> bytes:
        """Return the cache namespace of a model or adapter; empty if the worker has no cache daemon."""
        found = {adapter.name: adapter.namespace for adapter in self.model.adapters}
        return found.get(name, self.model.namespace)

    async def poll(self, prepare: Prepare | None = None) -> None:
        """Query the worker's models. ``prepare`` first applies the adapter changes that the worker missed."""
        try:
            model = await self._model()
            if prepare is not None and await prepare(self, model):
                model = await self._model()
            self.model = model
            if not self.alive:
                log.info("worker is up", worker=self.target, model=self.model.model_id)
            self.alive = self.was_up = True
        except grpc.RpcError as error:
            self.down(error.code().name)

    async def _model(self) -> pb.GetModelResponse:
        """Query a worker that is down over both connections: it is up when requests reach it, too."""
        clients = (self.poll_client,) if self.alive else (self.poll_client, self.client)
        calls = (client.stub.GetModel(pb.GetModelRequest(), timeout=_POLL_TIMEOUT_SECONDS) for client in clients)
        found: list[pb.GetModelResponse] = await asyncio.gather(*calls)
        return found[0]

    async def call(self, method: str, request: Any, timeout_seconds: float = _CALL_SECONDS) -> Any:
        """Call a unary method of the worker. Raises KVSidecarError."""
        try:
            return await getattr(self.client.stub, method)(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise from_rpc(error) from error

    def error_of(self, error: grpc.RpcError) -> KVSidecarError:
        """Return the client's error for a failed call: the worker's own error, or one for the gRPC status."""
        sent = sent_error(error)
        if sent is not None and not isinstance(sent, Cancelled):
            return sent
        found, code = from_rpc(error), error.code()
        if code is grpc.StatusCode.CANCELLED:  # not the client's cancellation, which cancels this task
            return Unavailable("the worker cancelled the request; try again")
        if isinstance(found, RequestTooLarge):
            return found
        log.warning("a call to a worker failed", worker=self.target, error=str(found))
        if isinstance(found, DeadlineExceeded):
            return DeadlineExceeded("the answer took longer than the gateway's --request-seconds allow")
        if isinstance(found, Unavailable):
            return Unavailable("the worker went away; try again in a moment")
        return KVSidecarError(f"the worker failed ({code.name}); its log says why")

    def down(self, why: str) -> None:
        if self.alive:
            log.warning("worker is down", worker=self.target, error=why)
            self.down_at = time.monotonic()
        self.alive = False
        self.refused.clear()


Prepare = Callable[[Worker, pb.GetModelResponse], Awaitable[bool]]
"""Prepares a worker, which reports these models, for requests; returns whether it changed the worker."""


class WorkerRouter:
    """Polls the workers, and remembers which worker processed which prompt prefix."""

    def __init__(self, targets: list[str]) -> None:
        self.started = int(time.time())
        self.workers = [Worker(t, AsyncClient(t, RECONNECT), AsyncClient(t, _POLL_CONNECTION)) for t in targets]
        self._worker_by_prefix: OrderedDict[bytes, Worker] = OrderedDict()
        self._pollers: list[asyncio.Task[None]] = []
        self.prepare: Prepare | None = None

    async def start(self) -> None:
        await asyncio.gather(*(w.poll() for w in self.workers))
        self._pollers = [asyncio.create_task(self._poll(w)) for w in self.workers]

    async def close(self) -> None:
        for poller in self._pollers:
            poller.cancel()
        await asyncio.gather(*(client.close() for w in self.workers for client in (w.client, w.poll_client)))

    async def _poll(self, worker: Worker) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS if worker.alive else _WAITING_POLL_SECONDS)
            await worker.poll(self.prepare)

    @property
    def alive(self) -> list[Worker]:
        """The workers that answer polls. If none does, raises Unavailable with the likely cause."""
        found = [w for w in self.workers if w.alive]
        if not found:
            raise Unavailable(self._unavailable_reason())
        return found

    @property
    def was_up(self) -> bool:
        """Return whether at least one worker was ever up, so that a restart is likely."""
        return any(w.was_up for w in self.workers)

    def _unavailable_reason(self) -> str:
        if self.was_up:
            return "no inference worker is up; try again in a moment"
        return "no inference worker is ready yet: the model is still being loaded; try again in a moment"

    def pick(self, request: pb.GenerateRequest, excluded: set[str]) -> Worker:
        """Choose a worker for a request. Raises Unavailable if no worker outside of ``excluded`` serves its model."""
        able = [w for w in self.workers if w.alive and w.target not in excluded and w.serves(request.model)]
        if not able:
            raise Unavailable(self._unavailable_reason())
        least = min(w.in_flight for w in able)
        blocks = [*_routing_key_hash(request), *_prompt_prefix_hashes(request)]
        for block in reversed(blocks):
            worker = self._worker_by_prefix.get(block)
            if worker is not None and worker in able and worker.in_flight <= least + _MAX_LOAD_DIFFERENCE:
                break
        else:
            worker = min(able, key=lambda w: w.in_flight)
        for block in blocks:
            self._worker_by_prefix[block] = worker
            self._worker_by_prefix.move_to_end(block)
        while len(self._worker_by_prefix) > _MAX_PREFIXES:
            self._worker_by_prefix.popitem(last=False)
        return worker


def _scoped(*scope: bytes) -> Any:
    """Return a hash object that contains a scope, such as model and salt: workers share no prefixes across scopes."""
    return hashlib.sha256(b"".join(len(part).to_bytes(4, "little") + part for part in scope))


def _routing_key_hash(request: pb.GenerateRequest) -> list[bytes]:
    """Return the hash of the request's ``prompt_cache_key``; it decides if no worker has processed a prefix."""
    scope = request.model.encode(), request.cache.tenant_salt, request.cache.prompt_cache_key.encode()
    return [_scoped(b"key", *scope).digest()] if request.cache.prompt_cache_key else []


def _prompt_prefix_hashes(request: pb.GenerateRequest) -> list[bytes]:
    """Return chained hashes of prefixes of the prompt, shortest first.

    A prefix ends after each block of bytes, and after each of a chat's first messages. Equal prefixes have equal
    hashes. The function hashes at most ``_MAX_HASHED_BYTES``, because it runs on the event loop.
    """
    digest = _scoped(request.model.encode(), request.cache.tenant_salt)
    is_chat = request.prompt.WhichOneof("kind") == "chat"
    found: list[bytes] = []
    size, edge = 0, _BLOCK_BYTES
    for number, part in enumerate(_prompt_bytes(request.prompt)):
        data = memoryview(part)[: _MAX_HASHED_BYTES - size]
        while size + len(data) >= edge:
            digest.update(data[: edge - size])
            data = data[edge - size :]
            size, edge = edge, edge + _BLOCK_BYTES
            found.append(digest.digest()[:12])
        digest.update(data)
        size += len(data)
        if is_chat and data and number < _MAX_HASHED_MESSAGES:
            found.append(digest.digest()[:12])
    return found or [digest.digest()[:12]]


def _prompt_bytes(prompt: Any) -> Iterator[bytes]:
    """Yield the prompt in parts: tools and messages of a chat. Yields at least the first ``_MAX_HASHED_BYTES``."""
    kind, size = prompt.WhichOneof("kind"), 0
    if kind == "text":
        yield prompt.text[:_MAX_HASHED_BYTES].encode()
    elif kind == "chat":  # in the order of chat templates: tools first
        for part in chain(prompt.chat.tools, prompt.chat.messages):
            if size >= _MAX_HASHED_BYTES:
                return
            data = part.SerializeToString(deterministic=True)
            size += len(data)
            yield data
    elif kind == "token_ids":
        yield array("I", prompt.token_ids.ids[: _MAX_HASHED_BYTES // 4]).tobytes()
