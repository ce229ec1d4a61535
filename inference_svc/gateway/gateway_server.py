"""Runs the gateway on uvicorn: listening socket, TLS, signals."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import structlog
import uvicorn
from fastapi import FastAPI
from kvsidecar.errors import ConfigurationError
from kvsidecar.net.addresses import TcpAddress
from kvsidecar.process.fd_limit import raise_descriptor_limit
from kvsidecar.process.runtime_dir import default_runtime_dir, own_runtime_dir
from kvsidecar.telemetry.otel_export import otlp_providers
from kvsidecar.telemetry.tracer import NOOP_TRACER

from inference_svc.gateway.connection_limits import ConnectionLimits, bounded, max_connections
from inference_svc.gateway.drain import Drain
from inference_svc.gateway.gateway_config import GatewayConfig
from inference_svc.gateway.http_tracing import SERVICE_NAME
from inference_svc.gateway.routes import create_app

# GIL switch interval: the event loop waits at most this long while the thread for large bodies runs Python code.
_SWITCH_SECONDS = 0.001
# A draining server still accepts requests for this long: load balancers need a few seconds to notice its readiness.
_LISTEN_SECONDS = 5.0
# Additional time in which uvicorn sends the last bytes of the cut-off answers.
_LAST_SECONDS = 2.0

log = structlog.get_logger("gateway")


async def serve(config: GatewayConfig) -> None:
    """Serve until SIGTERM or SIGINT; SIGHUP reloads the tenants file.

    Raises ConfigurationError if the address is not available.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; choose another --host or --port"
        ) from error
    if not (config.for_this_machine or config.api_key.get_secret_value() or config.tenants):
        log.warning("listening beyond this machine without an API key", host=config.host)
    if not config.nodes:
        _refuse_foreign(config)
    raise_descriptor_limit()
    sys.setswitchinterval(_SWITCH_SECONDS)
    _tell_of_uvicorn()
    url = f"{'http' if config.tls_cert is None else 'https'}://{TcpAddress(config.host, listener.getsockname()[1])}/v1"
    async with otlp_providers(SERVICE_NAME, config.otlp_endpoint) as providers:
        tracer = NOOP_TRACER if providers is None else providers.tracer("inference_svc.gateway")
        app = _fleet(config) if config.nodes else create_app(config, tracer)
        server = _Server(configured(app, config), app.state.drain)
        server.hear_signals()
        if config.tenants is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, app.state.keys.reload)
        await asyncio.sleep(0)  # a signal that arrived earlier takes effect here, before anything has started
        if config.nodes:
            log.info("listening; it answers as soon as a node is ready", url=url, nodes=config.nodes)
        else:
            log.info("listening; it answers as soon as a worker is ready", url=url, workers=config.targets)
        await server.serve(sockets=[listener])


def _refuse_foreign(config: GatewayConfig) -> None:
    """Refuse a runtime folder of another user.

    That user could replace the sockets in it and receive all prompts. Raises ConfigurationError.
    """
    sockets = {Path(target).parent for target in config.targets} | {(config.cache_socket or Path("-")).parent}
    if default_runtime_dir() in sockets:
        own_runtime_dir()


def _fleet(config: GatewayConfig) -> FastAPI:
    # Imported here because fleet_app imports an HTTP client, which would delay the start of a node's own gateway.
    from inference_svc.gateway.fleet.fleet_app import create_app

    return create_app(config)


class _Structured(logging.Handler):
    """Handler that writes uvicorn's own messages, such as those about invalid requests, in the common log format."""

    def emit(self, record: logging.LogRecord) -> None:
        log.log(record.levelno, record.getMessage().rstrip("."), exc_info=record.exc_info)


def _tell_of_uvicorn() -> None:
    its = logging.getLogger("uvicorn.error")
    its.handlers, its.propagate = [_Structured()], False


class _Server(uvicorn.Server):
    """uvicorn's server, which drains before it stops.

    The event loop handles signals from before uvicorn starts. uvicorn itself handles signals only while it runs; an
    earlier signal would end the process with a traceback.
    """

    def __init__(self, config: uvicorn.Config, drain: Drain) -> None:
        super().__init__(config)
        self._drain, self._parent = drain, os.getppid()
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain, then stop. A second signal cuts off the requests that still run."""
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._stop(sig, frame))
        else:
            self._drain.cut()

    async def _stop(self, sig: int, frame: FrameType | None) -> None:
        if os.getppid() != self._parent:  # the supervisor died, and the next one needs the port now
            self.config.timeout_graceful_shutdown = int(self._drain.seconds)
        elif self.started:  # if the server has not started, uvicorn ends it without our drain
            drain, loop = self._drain, asyncio.get_running_loop()
            drain.has_begun, deadline = True, loop.time() + drain.seconds
            if running := drain.num_running:
                log.info("draining", requests=running, seconds=drain.seconds)
            await drain.wait_idle(min(_LISTEN_SECONDS, drain.seconds))
            left = min(drain.seconds, max(0.0, deadline - loop.time()))  # 0 after a second signal
            loop.call_later(left, drain.cut)
            self.config.timeout_graceful_shutdown = int(left + _LAST_SECONDS) + 1
        super().handle_exit(sig, frame)

    def hear_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def configured(app: FastAPI, config: GatewayConfig) -> uvicorn.Config:
    """Return uvicorn's configuration. Raises ConfigurationError for unusable certificates."""
    # Each request of a fleet gateway needs two descriptors: one to the client and one to a node.
    most = max_connections(descriptors_each=2 if config.nodes else 1)
    limits = ConnectionLimits(config.receive_seconds, config.send_seconds, app.state.counters.refused, most)
    found = uvicorn.Config(
        app,
        http=bounded(limits),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=int(_LAST_SECONDS),
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
        ssl_ca_certs=None if config.tls_client_ca is None else str(config.tls_client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if config.tls_client_ca is None else ssl.CERT_REQUIRED,
    )
    try:
        found.load()
    except OSError as error:  # includes ssl.SSLError
        named = ", ".join(str(f) for f in (config.tls_cert, config.tls_key, config.tls_client_ca) if f is not None)
        raise ConfigurationError(f"cannot use the certificates ({named}): {error}") from error
    return found
