"""One answer, from a node to the client. As long as nothing of it was sent, another node can give it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack

import httpx
import structlog
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from kvsidecar.errors import DeadlineExceeded, Unavailable
from starlette.types import Receive, Scope, Send

from inference_svc.gateway.answer_writer import error_response
from inference_svc.gateway.client_disconnect import while_there
from inference_svc.gateway.fleet.discovery import BROKEN, Node, NodeFailed
from inference_svc.gateway.fleet.fleet_metrics import FleetMetrics
from inference_svc.gateway.fleet.node_wait import NodeWait
from inference_svc.gateway.fleet.prefix_query import Asked, Asking
from inference_svc.gateway.fleet_api import MOST_WARMING_SECONDS, WARM
from inference_svc.gateway.openai_format import event
from inference_svc.gateway.request_log import line

log = structlog.get_logger("gateway")

# A prompt that ends the nodes that read it ends no more than so many.
MOST_TRIES = 3
# The node is away, or its workers are; or it has as much to do as it takes.
_ELSEWHERE = frozenset({502, 503})
_BUSY, _UNKNOWN = 429, 401
_EVENTS = "text/event-stream"
# So long somebody is waited for when the last node that was up has failed.
_NOBODY_SECONDS = 3.0


class Relay:
    """Sends requests on. ``request_seconds`` is for a whole answer, all tries together; ``wait`` says for how
    long a request stays while no node has a worker."""

    def __init__(
        self,
        asking: Asking,
        client: httpx.AsyncClient,
        metrics: FleetMetrics,
        request_seconds: float,
        wait: NodeWait,
    ) -> None:
        self._asking, self._client, self._metrics, self._seconds = asking, client, metrics, request_seconds
        self._wait = wait

    async def answer(self, request: Request, asked: Asked) -> Response:
        """Raises KVSidecarError when there is no answer to hand on, ClientGone."""
        return await while_there(request, self._answer(asked), _close)

    async def _answer(self, asked: Asked) -> Response:
        loop, began = asyncio.get_running_loop(), time.perf_counter()
        since = loop.time()
        deadline, give_up = since + self._patience(asked), 0.0
        found: Asked | None = None
        tried: list[Node] = []
        tries, waited, refused = 0, False, None
        while True:
            try:
                found = found or await self._asking.found(asked)
                node = await self._asking.place(found, tried)
            except Unavailable:
                if refused is not None:
                    return refused
                now = loop.time()
                if now < deadline and self._wait.goes_on(asked, since):
                    waited, give_up = True, 0.0
                else:  # a node says that it has a worker a little after it says that it starts none any more
                    give_up = give_up or now + _NOBODY_SECONDS
                    if not (tries or waited) or now > give_up:
                        raise
                tried.clear()  # one that failed may be back
                await self._wait.pause()
                continue
            tries, give_up = tries + 1, 0.0
            tried.append(node)
            opened = _Opened(node, deadline)
            try:
                answer = await opened.open(self._client, found, self._asking.has_another(found, tried))
                if isinstance(answer, _Stream):
                    self._metrics.ttft.observe(time.perf_counter() - began)
                return answer
            except _Refused as error:
                refused, why = error.answer, str(error)
                if error.answer.status_code != _BUSY:
                    node.down(why)
            except NodeFailed as error:
                why = str(error)
                node.down(why)
            except TimeoutError:
                raise DeadlineExceeded(f"no node answered within {self._seconds:g} s") from None
            if tries >= MOST_TRIES:
                if refused is not None:
                    return refused
                raise Unavailable(f"{tries} nodes failed to answer, the last one because: {why}")
            self._metrics.retries.inc()

    def _patience(self, asked: Asked) -> float:
        """Seconds for an answer. Whoever warms says how long that may take, and the node checks it."""
        if asked.path != WARM or asked.within_seconds is None:
            return self._seconds
        return max(self._seconds, min(asked.within_seconds, MOST_WARMING_SECONDS))


class _Refused(Exception):
    """A whole answer by which a node says that another should be asked."""

    def __init__(self, answer: Response) -> None:
        super().__init__(f"it answers {answer.status_code}")
        self.answer = answer


class _Opened:
    """A request that a node has. Whoever is through with it, for whatever reason, closes it."""

    def __init__(self, node: Node, deadline: float) -> None:
        self._node, self._deadline = node, deadline
        self._held = ExitStack()
        self._response: httpx.Response | None = None

    async def open(self, client: httpx.AsyncClient, asked: Asked, has_another: bool) -> Response:
        """A whole answer, or one whose first bytes are there. Where another node can be asked, this one does not wait
        for a worker that it has lost. Raises NodeFailed, _Refused, TimeoutError."""
        self._held.enter_context(self._node.counted())
        try:
            answer = await self._open(client, asked, has_another)
        except BROKEN as error:
            await self.close()
            raise NodeFailed(str(error) or type(error).__name__) from error
        except BaseException:
            await self.close()
            raise
        if isinstance(answer, _Stream):
            return answer
        await self.close()
        if answer.status_code == _UNKNOWN:  # nothing that the client could mend
            raise NodeFailed("it does not take this gateway's key")
        if answer.status_code in _ELSEWHERE or answer.status_code == _BUSY:
            raise _Refused(answer)
        return answer

    async def _open(self, client: httpx.AsyncClient, asked: Asked, has_another: bool) -> Response:
        wait_seconds = 0.0 if has_another else asked.wait_seconds
        preference = {} if wait_seconds is None else {"Prefer": f"wait={int(wait_seconds)}"}
        request = client.build_request(
            "POST",
            self._node.url + asked.path,
            content=asked.raw,
            headers={"Content-Type": "application/json"} | preference,
            extensions=self._node.extensions,
        )
        response = await self._node.until(client.send(request, stream=True), self._deadline)
        self._response = response
        if response.headers.get("content-type", "").startswith(_EVENTS):
            pieces = response.aiter_raw()
            first = await self._node.until(anext(pieces, b""), self._deadline)
            if not first:
                raise NodeFailed("it began an answer and said nothing")
            return _Stream(self, first, pieces)
        return whole(response, await self._node.until(response.aread(), self._deadline))

    async def pieces(self, first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """What the node sends; if it breaks off, an error as the last event."""
        yield first
        try:
            while piece := await self._node.until(anext(rest, b""), self._deadline):
                yield piece
        except (*BROKEN, NodeFailed, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            if not late:
                self._node.down(str(error) or type(error).__name__)
            said = (
                DeadlineExceeded("the answer took too long") if late else Unavailable("the node broke off its answer")
            )
            line().abort(said.reason)
            yield b"\n\n" + event(json.loads(bytes(error_response(said).body)))

    async def close(self) -> None:
        self._held.close()
        if self._response is not None:
            response, self._response = self._response, None
            await response.aclose()


class _Stream(StreamingResponse):
    """Hands on events, and closes the node's answer also when its client went before the first of them."""

    def __init__(self, opened: _Opened, first: bytes, rest: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(opened.pieces(first, rest), media_type=_EVENTS, headers=headers)
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.close()

    async def close(self) -> None:
        await self._opened.close()


async def _close(answer: Response) -> None:
    """Ends what a node has begun, and nobody wants."""
    if isinstance(answer, _Stream):
        await answer.close()


def whole(response: httpx.Response, content: bytes) -> Response:
    """An answer as it came."""
    kept = {name: response.headers[name] for name in ("content-type", "retry-after") if name in response.headers}
    return Response(content, response.status_code, headers=kept)
