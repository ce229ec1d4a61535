"""Starts a worker: model, engine, socket, signals, graceful end."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from kvsidecar.errors import ConfigurationError
from kvsidecar.inference.v1 import inference_pb2
from kvsidecar.inference.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from kvsidecar.runtime import ensure_private_dir, socket_target

from inference_svc.config import WorkerConfig
from inference_svc.engine.pool import PAGE_TOKENS
from inference_svc.metrics import serve_metrics
from inference_svc.runtime import Runtime, build
from inference_svc.service import InferenceService

GRACE_SECONDS = 10.0
_MAX_MESSAGE_BYTES = 16 << 20
SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

log = structlog.get_logger("worker")


async def serve(config: WorkerConfig) -> None:
    """Runs a worker until SIGTERM or SIGINT. Raises ConfigurationError, ModelUnsupported."""
    ensure_private_dir(config.socket.parent)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    config.socket.unlink(missing_ok=True)  # a killed worker's: nobody must take it for a live one while this loads
    log.info("loading the model", model=config.model)
    runtime = await asyncio.to_thread(build, config)
    try:
        if not stop.is_set():
            await _serve(config, runtime, stop)
    finally:
        await asyncio.to_thread(runtime.close)


async def _serve(config: WorkerConfig, runtime: Runtime, stop: asyncio.Event) -> None:
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)]
    )
    add_InferenceServiceServicer_to_server(InferenceService(runtime), server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection((SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name), server)
    mask = os.umask(0o177)
    try:
        server.add_insecure_port(socket_target(config.socket))
        if config.tcp:
            server.add_insecure_port(config.tcp)
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen on {config.socket} {config.tcp}: {error}") from error
    finally:
        os.umask(mask)
    await server.start()
    os.chmod(config.socket, 0o600)
    if config.metrics_port:
        serve_metrics(runtime, config.metrics_port)
    for name in ("", SERVICE):
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    loaded = runtime.engine.loaded
    log.info(
        "serving",
        model=loaded.id,
        socket=str(config.socket),
        device=str(loaded.device),
        dtype=str(loaded.dtype),
        pool_tokens=runtime.engine.pool.pages * PAGE_TOKENS,
        cache=runtime.cache is not None and runtime.cache.attached,
    )
    await stop.wait()
    log.info("stopping")
    await health.enter_graceful_shutdown()
    await server.stop(GRACE_SECONDS)
    config.socket.unlink(missing_ok=True)
