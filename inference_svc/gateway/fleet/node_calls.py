"""Short calls to one chosen node: forwarded unchanged, and never retried on another node."""

from __future__ import annotations

import asyncio

import httpx
from fastapi import Request, Response
from kvsidecar.errors import Unavailable

from inference_svc.gateway.api_keys import GUEST_HEADER, ApiKeys
from inference_svc.gateway.body_reader import BodyReader
from inference_svc.gateway.explain_header import EXPLAIN_HEADER
from inference_svc.gateway.fleet.node_discovery import CONNECTION_ERRORS, Node, NodeFailed
from inference_svc.gateway.fleet.proxy import encode_headers, proxied_response

# Headers of the client that change a node's answer, so the gateway forwards them.
_FORWARDED_HEADERS = ("x-request-id", "x-cache-salt", EXPLAIN_HEADER)


class NodeCalls:
    """Forwards clients' calls. ``seconds`` is the default deadline of a call."""

    def __init__(self, client: httpx.AsyncClient, bodies: BodyReader, keys: ApiKeys, seconds: float) -> None:
        self._client, self._bodies, self._keys, self._seconds = client, bodies, keys, seconds

    def headers(self, request: Request) -> dict[str, str]:
        """Return the headers of a forwarded request, decoded as Latin-1.

        A node takes a request with the fleet's key for an operator's. So an additional header marks a guest's request.
        """
        sent = {name: request.headers[name] for name in _FORWARDED_HEADERS if name in request.headers}
        return sent if self._keys.is_operator(request.scope) else sent | {GUEST_HEADER: "1"}

    async def read(self, request: Request) -> bytes:
        """Return the body of a request; empty if it has none. Raises InvalidRequest."""
        has_body = int(request.headers.get("content-length") or 0) > 0 or "transfer-encoding" in request.headers
        return await self._bodies.read(request, lambda raw, _: raw) if has_body else b""

    async def send(self, node: Node, request: Request, raw: bytes, seconds: float | None = None) -> Response:
        """Send a request with the body ``raw`` to a node. Raises Unavailable."""
        deadline = asyncio.get_running_loop().time() + (self._seconds if seconds is None else seconds)
        try:
            asked = self._client.request(
                request.method,
                f"{node.url}{request.url.path}",
                params=tuple(request.query_params.multi_items()),
                content=raw,
                headers=encode_headers(self.headers(request) | ({"Content-Type": "application/json"} if raw else {})),
                extensions=node.extensions,
            )
            answer = await node.wait_for(asked, deadline)
        except (*CONNECTION_ERRORS, NodeFailed, TimeoutError) as error:
            raise Unavailable("the node of this call does not answer; try again in a moment") from error
        return proxied_response(answer, answer.content)
