"""Forwards requests to nodes, and retries on another node before the answer begins."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack

import httpx
import structlog
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from kvsidecar.errors import DeadlineExceeded, KVSidecarError, Unavailable
from starlette.types import Receive, Scope, Send

from inference_svc.gateway.answer_summary import SUMMARY_HEADER, SummaryFilter, parse_summary
from inference_svc.gateway.anthropic_api.error_envelope import REQUEST_ID, messages_error_event
from inference_svc.gateway.client_disconnect import cancel_on_disconnect
from inference_svc.gateway.explain_header import MISS_HEADER
from inference_svc.gateway.fleet.fleet_metrics import FleetMetrics
from inference_svc.gateway.fleet.node_discovery import CONNECTION_ERRORS, Node, NodeFailed
from inference_svc.gateway.fleet.node_wait import NodeWait
from inference_svc.gateway.fleet.prefix_query import PrefixQuery, RoutedRequest
from inference_svc.gateway.fleet_api import MAX_WARM_SECONDS, PIN_PATH, WARM_PATH
from inference_svc.gateway.openai_writer import error_event
from inference_svc.gateway.request_log import log_line
from inference_svc.gateway.worker_wait import NOTICE_SECONDS

log = structlog.get_logger("gateway")

# A prompt that crashes nodes crashes at most this many.
MAX_TRIES = 3
# These statuses may mean that the node's workers are down; a poll tells.
_RETRY_STATUS = frozenset({502, 503})
_BUSY, _UNAUTHORIZED = frozenset({429, 529}), 401
_EVENTS, _EVENT_END = "text/event-stream", b"\n\n"
# Wait this long for a node after the last live one has failed.
_NO_NODE_SECONDS = 3.0


class Proxy:
    """Forwards requests to nodes.

    ``request_seconds`` is the deadline of a complete answer, all tries included. ``wait`` decides how long a request
    waits while no node has a worker.
    """

    def __init__(
        self,
        prefix_query: PrefixQuery,
        client: httpx.AsyncClient,
        metrics: FleetMetrics,
        request_seconds: float,
        wait: NodeWait,
    ) -> None:
        self._prefix_query, self._client, self._metrics, self._seconds = prefix_query, client, metrics, request_seconds
        self._wait = wait

    async def answer(self, request: Request, asked: RoutedRequest) -> Response:
        """Return a node's answer. Raises KVSidecarError when no node answers, ClientDisconnected."""
        return await cancel_on_disconnect(request, self._answer(asked), _close)

    async def _answer(self, asked: RoutedRequest) -> Response:
        loop, began = asyncio.get_running_loop(), time.perf_counter()
        since = loop.time()
        deadline, give_up = since + self._answer_seconds(asked), 0.0
        found: RoutedRequest | None = None
        tried: list[Node] = []
        tries, waited, refused, is_final = 0, False, None, True
        while True:
            try:
                found = found or await self._prefix_query.with_owner(asked)
                node = await self._prefix_query.choose_node(found, tried)
            except Unavailable:
                if refused is not None and is_final:
                    return refused
                refused = None  # the node left the request to another one, which has failed since
                now = loop.time()
                if now < deadline and self._wait.should_wait(asked, since):
                    waited, give_up = True, 0.0
                else:  # a node's report "starting" ends before its report of the new worker
                    give_up = give_up or now + (NOTICE_SECONDS if waited else _NO_NODE_SECONDS)
                    if not (tries or waited) or now > give_up:
                        raise
                tried.clear()  # a failed node may be up again
                await self._wait.pause()
                continue
            tries, give_up = tries + 1, 0.0
            tried.append(node)
            opened = _NodeRequest(node, deadline)
            log_line().add(node=node.url, tries=tries)
            has_another = self._prefix_query.has_another(found, tried)
            try:
                answer = await opened.open(self._client, found, has_another)
                if isinstance(answer, _ProxiedStream):
                    self._metrics.ttft.observe(time.perf_counter() - began)
                    log_line().first_token()
                return answer
            except _NodeRefusal as error:
                refused, why = error.answer, str(error)
                is_final = refused.status_code in _BUSY or not has_another
                if refused.status_code not in _BUSY:
                    node.poll_soon()
            except NodeFailed as error:
                why = str(error)
                node.down(why)
            except TimeoutError:
                raise DeadlineExceeded(f"no node answered within {self._seconds:g} s") from None
            if tries >= MAX_TRIES:
                if refused is not None:
                    return refused
                raise Unavailable(f"{tries} nodes failed to answer, the last one because: {why}")
            self._metrics.retries.inc()

    def _answer_seconds(self, asked: RoutedRequest) -> float:
        """Return the deadline of an answer, in seconds.

        A warm or pin request may have a longer deadline of its own, which the node enforces.
        """
        if asked.path not in (WARM_PATH, PIN_PATH) or asked.within_seconds is None:
            return self._seconds
        return max(self._seconds, min(asked.within_seconds, MAX_WARM_SECONDS))


class _NodeRefusal(Exception):
    """A complete answer of a busy or unavailable node; another node may accept the request."""

    def __init__(self, answer: Response) -> None:
        super().__init__(f"it answers {answer.status_code}")
        self.answer = answer


class _NodeRequest:
    """One request to one node. ``open`` closes it, unless it returns a stream, which the caller must close."""

    def __init__(self, node: Node, deadline: float) -> None:
        self._node, self._deadline = node, deadline
        self._held = ExitStack()
        self._response: httpx.Response | None = None

    async def open(self, client: httpx.AsyncClient, asked: RoutedRequest, has_another: bool) -> Response:
        """Return a complete answer, or a stream whose first bytes have arrived.

        ``has_another`` says that another node can answer: this node then refuses at once instead of waiting for a lost
        worker. Raises NodeFailed, _NodeRefusal, TimeoutError.
        """
        self._held.enter_context(self._node.counting_request())
        try:
            answer = await self._open(client, asked, has_another)
        except CONNECTION_ERRORS as error:
            await self.close()
            raise NodeFailed(str(error) or type(error).__name__) from error
        except BaseException:
            await self.close()
            raise
        if isinstance(answer, _ProxiedStream):
            return answer
        await self.close()
        if answer.status_code == _UNAUTHORIZED:  # the node refuses this gateway's key, not the client's
            raise NodeFailed("it does not take this gateway's key")
        if answer.status_code in _RETRY_STATUS or answer.status_code in _BUSY:
            raise _NodeRefusal(answer)
        return answer

    async def _open(self, client: httpx.AsyncClient, asked: RoutedRequest, has_another: bool) -> Response:
        wait_seconds = 0.0 if has_another else asked.wait_seconds
        preference = {} if wait_seconds is None else {"Prefer": f"wait={int(wait_seconds)}"}
        request = client.build_request(
            "POST",
            self._node.url + asked.path,
            content=asked.raw,
            headers=encode_headers(
                {**asked.headers, "Content-Type": "application/json", SUMMARY_HEADER: "1"} | preference
            ),
            extensions=self._node.extensions,
        )
        response = await self._node.wait_for(client.send(request, stream=True), self._deadline)
        self._response = response
        if response.headers.get("content-type", "").startswith(_EVENTS):
            pieces = response.aiter_raw()
            first = await self._node.wait_for(anext(pieces, b""), self._deadline)
            if not first:
                raise NodeFailed("it began an answer and said nothing")
            return _ProxiedStream(self, first, pieces)
        content = await self._node.wait_for(response.aread(), self._deadline)
        log_line().adopt(parse_summary(response.headers.get(SUMMARY_HEADER, "").encode()))
        return proxied_response(response, content)

    async def pieces(self, first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the node's events. After a failure of the node, yield an error as the last event.

        An event is forwarded when it is whole, so that a reader never gets a part of one before the error.
        """
        summary, held, piece = SummaryFilter(), bytearray(), first
        try:
            while piece:
                searched = max(len(held) - 1, 0)
                held += summary.feed(piece)
                if (end := held.rfind(_EVENT_END, searched)) >= 0:
                    whole = bytes(held[: end + len(_EVENT_END)])
                    del held[: len(whole)]
                    yield whole
                piece = await self._node.wait_for(anext(rest, b""), self._deadline)
            if last := bytes(held) + summary.rest():
                yield last
            log_line().adopt(summary.fields)
        except (*CONNECTION_ERRORS, NodeFailed, TimeoutError) as error:
            late = isinstance(error, TimeoutError)
            if not late:
                self._node.down(str(error) or type(error).__name__)
            said = (
                DeadlineExceeded("the answer took too long") if late else Unavailable("the node broke off its answer")
            )
            log_line().abort(said.reason)
            yield self._error_event(said)

    @property
    def kept_headers(self) -> dict[str, str]:
        """Headers of the node's answer that the gateway forwards with a stream."""
        sent = {} if self._response is None else self._response.headers
        return {REQUEST_ID: sent[REQUEST_ID]} if REQUEST_ID in sent else {}

    def _error_event(self, error: KVSidecarError) -> bytes:
        if REQUEST_ID in self.kept_headers:  # the node answers in Anthropic's format
            return messages_error_event(error, self.kept_headers[REQUEST_ID])
        return error_event(error)

    async def close(self) -> None:
        self._held.close()
        if self._response is not None:
            response, self._response = self._response, None
            await response.aclose()


class _ProxiedStream(StreamingResponse):
    """Streams a node's events, then closes the request to the node.

    It also closes that request if the client disconnects before the first event.
    """

    def __init__(self, opened: _NodeRequest, first: bytes, rest: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **opened.kept_headers}
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
    """Cancel a node's stream whose client has disconnected."""
    if isinstance(answer, _ProxiedStream):
        await answer.close()


def encode_headers(headers: Mapping[str, str]) -> httpx.Headers:
    """Encode headers of a client as it sent them: Starlette decodes them as Latin-1, and httpx encodes only ASCII."""
    return httpx.Headers(headers, encoding="latin-1")


def proxied_response(response: httpx.Response, content: bytes) -> Response:
    """Return a node's complete answer, unchanged, as the gateway's answer."""
    kept = {
        name: response.headers[name]
        for name in ("content-type", "retry-after", REQUEST_ID, MISS_HEADER)
        if name in response.headers
    }
    return Response(content, response.status_code, headers=kept)
