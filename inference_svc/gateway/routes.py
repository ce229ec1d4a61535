"""A node's HTTP application: its paths, and what surrounds them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from kvsidecar.telemetry.tracing import NO_TRACER, Tracer

from inference_svc.gateway.app_factory import new_application, surround
from inference_svc.gateway.fleet_api import HELD, SERVING, WARM
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.handlers import Gateway
from inference_svc.gateway.http_tracing import Traced
from inference_svc.gateway.lora_routes import LOAD, UNLOAD
from inference_svc.gateway.origin_policy import OriginPolicy
from inference_svc.gateway.request_guard import NODE, Guard
from inference_svc.gateway.static_files import Page


def create_app(config: GatewayConfig, tracer: Tracer = NO_TRACER) -> FastAPI:
    """The application; its workers are polled from startup to shutdown. Its ``state.keys`` can be read again."""
    gateway = Gateway(config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.router.start()
        await gateway.node.start()
        yield
        gateway.bodies.close()
        await gateway.node.close()
        await gateway.router.close()

    app = new_application(lifespan)
    app.state.gateway = gateway
    app.state.keys, app.state.counted = gateway.keys, gateway.metrics
    app.add_middleware(Traced, tracer=tracer)
    # Before all else it asks for the key.
    app.add_middleware(Guard, keys=gateway.keys, policy=OriginPolicy(config), metrics=gateway.metrics)
    surround(app, config.origins)
    app.add_api_route("/v1/models", gateway.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", gateway.model, methods=["GET"])
    app.add_api_route("/v1/chat/completions", gateway.chat, methods=["POST"])
    app.add_api_route("/v1/completions", gateway.complete, methods=["POST"])
    app.add_api_route("/v1/responses", gateway.respond, methods=["POST"])
    app.add_api_route("/v1/responses/{name}", gateway.response, methods=["GET"])
    app.add_api_route("/v1/responses/{name}", gateway.forget, methods=["DELETE"])
    app.add_api_route("/v1/embeddings", gateway.embed, methods=["POST"])
    app.add_api_route(LOAD, gateway.adapters.load, methods=["POST"])
    app.add_api_route(UNLOAD, gateway.adapters.unload, methods=["POST"])
    app.add_api_route("/tokenize", gateway.tokenize, methods=["POST"])
    app.add_api_route("/detokenize", gateway.detokenize, methods=["POST"])
    app.add_api_route("/openapi.json", gateway.describe, methods=["GET"])
    app.add_api_route("/version", gateway.version, methods=["GET"])
    app.add_api_route("/health", gateway.health, methods=["GET"])
    app.add_api_route("/metrics", gateway.show_metrics, methods=["GET"])
    app.add_api_route(NODE, gateway.show_node, methods=["GET"])
    app.add_api_route(SERVING, gateway.serving, methods=["GET"])
    app.add_api_route(HELD + "/v1/chat/completions", gateway.held_of_chat, methods=["POST"])
    app.add_api_route(HELD + "/v1/completions", gateway.held_of_completion, methods=["POST"])
    app.add_api_route(HELD + "/v1/responses", gateway.held_of_response, methods=["POST"])
    app.add_api_route(HELD + WARM, gateway.held_of_warming, methods=["POST"])
    app.add_api_route(WARM, gateway.warm, methods=["POST"])
    if config.page:
        page = Page()
        app.add_api_route("/", page.index, methods=["GET", "HEAD"])
        app.add_api_route("/page/{name}", page.file, methods=["GET", "HEAD"])
    return app
