"""Base FastAPI application of node and fleet gateways: error responses, CORS, request log."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from kvsidecar.errors import KVSidecarError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from inference_svc.gateway.anthropic_api.error_envelope import (
    envelope,
    error_response_for,
    request_id_of,
    uses_messages_format,
)
from inference_svc.gateway.client_disconnect import ClientDisconnected
from inference_svc.gateway.drain import Drain
from inference_svc.gateway.health_routes import add_liveness
from inference_svc.gateway.openai_writer import unknown_path
from inference_svc.gateway.request_log import RequestLogMiddleware, log_line


def create_base_app(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]], drain_seconds: float) -> FastAPI:
    """Create an application with error responses and the liveness probe.

    Errors have OpenAI's or Anthropic's format, by the request's path. ``state.drain`` is the application's ``Drain``.
    """
    app = FastAPI(title="KVSidecar", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.router.redirect_slashes = False  # a redirect would go to whatever host the request's Host header names

    @app.exception_handler(KVSidecarError)
    async def failed(request: Request, error: KVSidecarError) -> JSONResponse:
        log_line().add(error=error.reason)
        return error_response_for(request.scope, error)

    @app.exception_handler(HTTPException)
    async def not_here(request: Request, error: HTTPException) -> JSONResponse:
        known = {path for route in app.routes if "{" not in (path := getattr(route, "path", "{"))}
        path, code = request.url.path, error.status_code
        if uses_messages_format(request.scope):
            text = f"{path[:100]} takes no {request.method}" if code == 405 else f"{path[:100]} is not served here"
            found = envelope(text, code, request_id_of(request.scope))
            return JSONResponse(found, status_code=code, headers=error.headers)
        return unknown_path(request.method, path, code, error.headers, known)

    @app.exception_handler(ClientDisconnected)
    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, error: Exception) -> Response:
        return Response(status_code=499)

    add_liveness(app)
    app.state.drain = Drain(drain_seconds)
    return app


def add_outer_middleware(app: FastAPI, origins: list[str]) -> None:
    """Add CORS for ``origins`` (https://fetch.spec.whatwg.org/#http-cors-protocol), and the request log.

    Call this after all other middleware was added, so that these two run first. CORS must answer preflight requests,
    which browsers send without a key; the log must record every request.
    """
    if origins:
        methods = ["GET", "POST", "DELETE"]
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=methods, allow_headers=["*"])
    app.add_middleware(RequestLogMiddleware)
