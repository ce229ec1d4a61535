"""Routes of a node's gateway: maps paths to handlers, and adds the middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from kvsidecar.telemetry.tracer import NOOP_TRACER, Tracer

from inference_svc.gateway.anthropic_api.error_envelope import COUNT_PATH, MESSAGES_PATH
from inference_svc.gateway.app_factory import add_outer_middleware, create_base_app
from inference_svc.gateway.cache_hints import RELEASE_PATH
from inference_svc.gateway.drain import DrainMiddleware
from inference_svc.gateway.fleet_api import (
    CACHED_PREFIX_PATH,
    INVOCATIONS_PATH,
    PIN_PATH,
    REQUEST_PATH,
    SERVING_PATH,
    UNPIN_PATH,
    WARM_PATH,
)
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.handlers import GatewayHandlers
from inference_svc.gateway.health_routes import add_readiness
from inference_svc.gateway.http_tracing import TracingMiddleware
from inference_svc.gateway.lora_routes import LOAD, UNLOAD
from inference_svc.gateway.origin_policy import OriginPolicy
from inference_svc.gateway.request_guard import NODE, RequestGuard
from inference_svc.gateway.static_files import StaticFiles


def create_app(config: GatewayConfig, tracer: Tracer = NOOP_TRACER) -> FastAPI:
    """Create the application; it polls the workers from startup to shutdown.

    ``state.keys`` has the API keys; SIGHUP reloads them.
    """
    gateway = GatewayHandlers(config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.router.start()
        await gateway.node.start()
        yield
        await gateway.kept.background.close()
        gateway.bodies.close()
        await gateway.node.close()
        await gateway.router.close()

    app = create_base_app(lifespan, config.drain_seconds)
    app.state.gateway = gateway
    app.state.keys, app.state.counters = gateway.keys, gateway.metrics
    app.add_middleware(DrainMiddleware, drain=app.state.drain)
    app.add_middleware(TracingMiddleware, tracer=tracer)
    # The guard is outside of the tracing middleware, so that a refused request gets no span.
    app.add_middleware(RequestGuard, keys=gateway.keys, policy=OriginPolicy(config), metrics=gateway.metrics)
    add_outer_middleware(app, config.origins)
    app.add_api_route("/v1/models", gateway.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", gateway.model, methods=["GET"])
    app.add_api_route("/v1/chat/completions", gateway.completions.chat, methods=["POST"])
    app.add_api_route("/v1/completions", gateway.completions.complete, methods=["POST"])
    app.add_api_route(INVOCATIONS_PATH, gateway.completions.invoke, methods=["POST"])
    app.add_api_route("/v1/responses", gateway.responses.create, methods=["POST"])
    app.add_api_route(MESSAGES_PATH, gateway.messages.create, methods=["POST"])
    app.add_api_route(COUNT_PATH, gateway.count_tokens.count, methods=["POST"])
    app.add_api_route("/v1/responses/input_tokens", gateway.count_input, methods=["POST"])
    for path, handler, method in (
        ("/v1/responses/{name}", gateway.kept.response, "GET"),
        ("/v1/responses/{name}", gateway.kept.forget, "DELETE"),
        ("/v1/responses/{name}/input_items", gateway.kept.input_items, "GET"),
        ("/v1/responses/{name}/cancel", gateway.kept.cancel, "POST"),
        ("/v1/conversations", gateway.kept.create, "POST"),
        ("/v1/conversations/{name}", gateway.kept.conversation, "GET"),
        ("/v1/conversations/{name}", gateway.kept.update, "POST"),
        ("/v1/conversations/{name}", gateway.kept.delete, "DELETE"),
        ("/v1/conversations/{name}/items", gateway.kept.items, "GET"),
        ("/v1/conversations/{name}/items", gateway.kept.add_items, "POST"),
        ("/v1/conversations/{name}/items/{item}", gateway.kept.item, "GET"),
        ("/v1/conversations/{name}/items/{item}", gateway.kept.delete_item, "DELETE"),
    ):
        app.add_api_route(path, handler, methods=[method])
    app.add_api_route("/v1/embeddings", gateway.embed, methods=["POST"])
    app.add_api_route(LOAD, gateway.adapters.load, methods=["POST"])
    app.add_api_route(UNLOAD, gateway.adapters.unload, methods=["POST"])
    app.add_api_route("/tokenize", gateway.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", gateway.detokenize, methods=["POST"])
    app.add_api_route("/tokenizer_info", gateway.tokenizer_info, methods=["GET"])
    app.add_api_route("/openapi.json", gateway.describe, methods=["GET"])
    app.add_api_route("/version", gateway.version, methods=["GET"])
    add_readiness(app, "worker", lambda: gateway.router.workers)
    app.add_api_route("/metrics", gateway.show_metrics, methods=["GET"])
    app.add_api_route(NODE, gateway.show_node, methods=["GET"])
    app.add_api_route(REQUEST_PATH + "/{name:path}", gateway.show_request, methods=["GET"])
    app.add_api_route(SERVING_PATH, gateway.serving_status, methods=["GET"])
    app.add_api_route(CACHED_PREFIX_PATH + "/v1/chat/completions", gateway.cached_prefix_of_chat, methods=["POST"])
    app.add_api_route(CACHED_PREFIX_PATH + "/v1/completions", gateway.cached_prefix_of_completion, methods=["POST"])
    app.add_api_route(CACHED_PREFIX_PATH + "/v1/responses", gateway.cached_prefix_of_response, methods=["POST"])
    app.add_api_route(CACHED_PREFIX_PATH + MESSAGES_PATH, gateway.cached_prefix_of_message, methods=["POST"])
    app.add_api_route(CACHED_PREFIX_PATH + WARM_PATH, gateway.cached_prefix_of_warm_request, methods=["POST"])
    app.add_api_route(WARM_PATH, gateway.warm_prompt, methods=["POST"])
    app.add_api_route(RELEASE_PATH, gateway.release_session, methods=["POST"])
    app.add_api_route(PIN_PATH, gateway.pin_prompt, methods=["POST"])
    app.add_api_route(UNPIN_PATH, gateway.unpin_prompt, methods=["POST"])
    if config.page:
        page = StaticFiles()
        app.add_api_route("/", page.index, methods=["GET", "HEAD"])
        app.add_api_route("/page/{name}", page.file, methods=["GET", "HEAD"])
    return app
