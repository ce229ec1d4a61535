"""Runs the gateway on uvicorn."""

from __future__ import annotations

import socket

import structlog
import uvicorn
from kvsidecar.addresses import TcpAddress
from kvsidecar.errors import ConfigurationError
from kvsidecar.telemetry import sending
from kvsidecar.tracing import NO_TRACER

from inference_svc.gateway.app import create_app
from inference_svc.gateway.config import GatewayConfig
from inference_svc.gateway.tracing import SERVICE_NAME

log = structlog.get_logger("gateway")


async def serve(config: GatewayConfig) -> None:
    """Serves until SIGTERM or SIGINT. Raises ConfigurationError when it cannot listen."""
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; choose another --host or --port"
        ) from error
    if not config.for_this_machine and not config.api_key.get_secret_value():
        log.warning("listening beyond this machine without an API key", host=config.host)
    url = f"http://{TcpAddress(config.host, listener.getsockname()[1])}/v1"
    log.info("listening; it answers as soon as a worker is ready", url=url, workers=config.targets)
    async with sending(SERVICE_NAME, config.otlp_endpoint) as providers:
        app = create_app(config, NO_TRACER if providers is None else providers.tracer("inference_svc.gateway"))
        settings = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=10)
        await uvicorn.Server(settings).serve(sockets=[listener])
