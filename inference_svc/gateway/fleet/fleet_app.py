"""The fleet gateway's application: forwards requests to nodes, and serves the fleet's status."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import structlog
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from kvsidecar import __version__
from kvsidecar.errors import (
    ConfigurationError,
    PermissionDenied,
    Unavailable,
    UnknownModel,
    UnknownRequest,
    UnknownResponse,
    UnsupportedOption,
)
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from inference_svc.gateway.anthropic_api.error_envelope import COUNT_PATH, MESSAGES_PATH
from inference_svc.gateway.anthropic_api.model_list import model_response, models_response
from inference_svc.gateway.api_keys import ApiKeys
from inference_svc.gateway.app_factory import add_outer_middleware, create_base_app
from inference_svc.gateway.body_reader import BodyReader
from inference_svc.gateway.drain import DrainMiddleware
from inference_svc.gateway.fleet.cache_calls import EVERYWHERE_PATHS, CacheCalls
from inference_svc.gateway.fleet.fleet_metrics import FleetMetrics
from inference_svc.gateway.fleet.node_calls import NodeCalls
from inference_svc.gateway.fleet.node_discovery import Node, NodeDiscovery
from inference_svc.gateway.fleet.node_wait import NodeWait
from inference_svc.gateway.fleet.prefix_query import (
    CONVERSATIONS,
    INPUT_TOKENS,
    PROMPT_PATHS,
    RESPONSES,
    PrefixQuery,
    to_routed_request,
)
from inference_svc.gateway.fleet.proxy import Proxy
from inference_svc.gateway.fleet_api import (
    CACHED_PREFIX_PATH,
    INVOCATIONS_PATH,
    PIN_PATH,
    REQUEST_PATH,
    SERVING_PATH,
    WARM_PATH,
)
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.health_routes import add_readiness
from inference_svc.gateway.lora_routes import LOAD, UNLOAD
from inference_svc.gateway.origin_policy import OriginPolicy
from inference_svc.gateway.request_guard import FLEET, RequestGuard
from inference_svc.gateway.worker_wait import preferred_wait_seconds

log = structlog.get_logger("gateway")

# Paths whose body has a prompt or tokens. Any node that serves the model can answer them.
_FORWARDED_PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    INVOCATIONS_PATH,
    RESPONSES,
    INPUT_TOKENS,
    MESSAGES_PATH,
    COUNT_PATH,
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    WARM_PATH,
    PIN_PATH,
)
# Paths and ids that the gateway forwards. With a segment "..", the node would serve another path.
_KEPT_PATH = re.compile(r"[\w/-]{1,400}", re.ASCII)
_ANSWER_ID = re.compile(r"(?!\.+$)[\w.:-]{1,400}", re.ASCII)
_CONNECT_SECONDS = 2.0
# The client closes an idle connection before the node does: a node's server closes it after 5 s.
_IDLE_SECONDS = 3.0


class FleetHandlers:
    """Handlers of a fleet gateway. One instance per process.

    The constructor raises ConfigurationError for unusable certificates.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.keys, self.metrics = ApiKeys(config), FleetMetrics()
        self.bodies = BodyReader(config, self.keys)
        self.client = _client(config)
        self.discovery = NodeDiscovery(config.node_addresses, self.client, config.node_seconds)
        self.metrics.watch(self.discovery)
        self._prefix_query = PrefixQuery(self.discovery, self.client, self.metrics.prefix_query_seconds)
        wait = NodeWait(self.discovery, config.worker_start_seconds)
        self._calls = NodeCalls(self.client, self.bodies, self.keys, config.node_seconds)
        self.cache = CacheCalls(self.discovery, self._prefix_query, self.bodies, self.keys, self._calls)
        self._proxy = Proxy(self._prefix_query, self.client, self.metrics, config.request_seconds, wait)

    async def forward(self, request: Request) -> Response:
        read = await self.bodies.read(request, partial(to_routed_request, request.url.path))
        wait_seconds, headers = preferred_wait_seconds(request.headers), self._calls.headers(request)
        return await self._proxy.answer(request, replace(read, wait_seconds=wait_seconds, headers=headers))

    async def kept(self, request: Request) -> Response:
        """Forward a call about a response or conversation to the node that stores it."""
        name, path = request.path_params["name"], request.url.path
        node = await self._prefix_query.node_with_response(name) if _KEPT_PATH.fullmatch(path) else None
        if node is None:
            kind = "conversation" if path.startswith(CONVERSATIONS) else "response"
            raise UnknownResponse(f"the {kind} {name[:80]!r} is not kept by any node that is up")
        return await self._calls.send(node, request, await self._calls.read(request))

    async def show_request(self, request: Request) -> Response:
        """Answer ``kvsidecar why``. Asks every node, because only the node that answered the request knows it."""
        name = request.path_params["name"]
        if not _ANSWER_ID.fullmatch(name):
            raise UnknownRequest(f"{name[:80]!r} is no answer's id; ids have letters, digits, '_', '-', '.' and ':'")
        if not self.discovery.alive:
            raise self.discovery.none_up()
        asked = (self._calls.send(node, request, b"") for node in self.discovery.alive)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = sorted((a for a in answers if isinstance(a, Response)), key=lambda answer: answer.status_code)
        if not found:
            raise Unavailable("no node answers; try again in a moment")
        return found[0]

    async def create_conversation(self, request: Request) -> Response:
        """Create a conversation on the node that has the fewest requests."""
        return await self._calls.send(self._idlest_node(), request, await self._calls.read(request))

    async def tokenizer_info(self, request: Request) -> Response:
        return await self._calls.send(self._idlest_node(), request, b"")

    def _idlest_node(self) -> Node:
        """Return the live node that has the fewest requests. Raises Unavailable when no node is up."""
        if not self.discovery.alive:
            raise self.discovery.none_up()
        return min(self.discovery.alive, key=lambda node: node.busy + node.in_flight)

    async def models(self, request: Request) -> Response:
        return models_response(request, list(self.discovery.models().values()))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._prefix_query.check_model(name)
        found = self.discovery.models().get(name)
        if found is None:
            raise UnknownModel("name a model", param="model")
        return model_response(request, found)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def refuse_adapters(self, request: Request) -> Response:
        raise UnsupportedOption(
            "a fleet's gateway loads and unloads no adapters: send this to the gateway of each node, and the fleet has "
            "what they have"
        )

    async def show_metrics(self, request: Request) -> Response:
        return PlainTextResponse(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def show_fleet(self, request: Request) -> Response:
        if not self.keys.is_operator(request.scope):
            raise PermissionDenied("what the fleet does is for operators; send the operator's key")
        shown = [_shown(node) for node in sorted(self.discovery.all, key=lambda node: node.url)]
        return JSONResponse({"version": __version__, "nodes": shown}, headers={"Cache-Control": "no-store"})


def _shown(node: Node) -> dict[str, Any]:
    return {
        "node": node.url,
        "state": "ready" if node.alive else "down" if node.was_up else "starting",
        "why": "" if node.alive else node.why,
        "models": sorted(node.models),
        "workers": node.workers,
        "requests": node.busy,
        "from_here": node.in_flight,
    }


def _client(config: GatewayConfig) -> httpx.AsyncClient:
    key = config.node_key.get_secret_value()
    if any(place.in_clear for place in config.node_addresses):
        log.warning("prompts and the nodes' key can be read on the way to nodes beyond this machine; use https there")
    try:
        tls = ssl.create_default_context(cafile=config.node_ca)
        if config.node_cert is not None:
            tls.load_cert_chain(config.node_cert, config.node_cert_key)
    except OSError as error:  # includes ssl.SSLError
        named = ", ".join(str(f) for f in (config.node_ca, config.node_cert, config.node_cert_key) if f is not None)
        raise ConfigurationError(f"cannot use the certificates for nodes ({named}): {error}") from error
    return httpx.AsyncClient(
        verify=tls,
        trust_env=False,  # the environment's HTTP proxy is not for nodes
        headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
        timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=_IDLE_SECONDS),
    )


def create_app(config: GatewayConfig) -> FastAPI:
    """Create the application; it polls the nodes from startup to shutdown. Raises ConfigurationError."""
    fleet = FleetHandlers(config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await fleet.discovery.start()
        yield
        fleet.bodies.close()
        await fleet.discovery.close()
        await fleet.client.aclose()

    app = create_base_app(lifespan, config.drain_seconds)
    app.state.fleet, app.state.counters = fleet, fleet.metrics
    app.add_middleware(DrainMiddleware, drain=app.state.drain)
    app.add_middleware(RequestGuard, keys=fleet.keys, policy=OriginPolicy(config), metrics=fleet.metrics)
    add_outer_middleware(app, config.origins)
    for path in _FORWARDED_PATHS:
        app.add_api_route(path, fleet.forward, methods=["POST"])
    for path, methods in (
        (RESPONSES + "/{name}", ["GET", "DELETE"]),
        (RESPONSES + "/{name}/input_items", ["GET"]),
        (RESPONSES + "/{name}/cancel", ["POST"]),
        (CONVERSATIONS + "/{name}", ["GET", "POST", "DELETE"]),
        (CONVERSATIONS + "/{name}/items", ["GET", "POST"]),
        (CONVERSATIONS + "/{name}/items/{item}", ["GET", "DELETE"]),
    ):
        app.add_api_route(path, fleet.kept, methods=methods)
    app.add_api_route(CONVERSATIONS, fleet.create_conversation, methods=["POST"])
    app.add_api_route(REQUEST_PATH + "/{name:path}", fleet.show_request, methods=["GET"])
    for path in EVERYWHERE_PATHS:
        app.add_api_route(path, fleet.cache.everywhere, methods=["POST"])
    for path in sorted(PROMPT_PATHS - {PIN_PATH}):
        app.add_api_route(CACHED_PREFIX_PATH + path, fleet.cache.cached_prefix, methods=["POST"])
    app.add_api_route(SERVING_PATH, fleet.cache.serving_status, methods=["GET"])
    app.add_api_route("/tokenizer_info", fleet.tokenizer_info, methods=["GET"])
    app.add_api_route("/v1/models", fleet.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", fleet.model, methods=["GET"])
    for path in (LOAD, UNLOAD):
        app.add_api_route(path, fleet.refuse_adapters, methods=["POST"])
    app.add_api_route("/version", fleet.version, methods=["GET"])
    add_readiness(app, "node", lambda: fleet.discovery.all)
    app.add_api_route("/metrics", fleet.show_metrics, methods=["GET"])
    app.add_api_route(FLEET, fleet.show_fleet, methods=["GET"])
    return app
