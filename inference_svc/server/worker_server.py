"""Worker server: start, signals, health and graceful shutdown of a worker process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection

import structlog
from grpc_health.v1.health_pb2 import HealthCheckResponse
from kvsidecar.inference.v1 import inference_pb2
from kvsidecar.inference.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from kvsidecar.net.grpc_server import Endpoint, serve_endpoint, stop_on_signals
from kvsidecar.net.health_service import HealthService
from kvsidecar.process.fd_limit import raise_descriptor_limit
from kvsidecar.process.runtime_dir import ensure_private_dir
from kvsidecar.telemetry.otel_export import OtelProviders, otlp_providers

from inference_svc.engine.engine import Engine
from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.models.progress_bar import disable_bars_off_terminal
from inference_svc.server.inference_service import InferenceService
from inference_svc.server.otel_observer import NOOP, SERVICE_NAME, OtelObserver
from inference_svc.server.runtime import Runtime, build_runtime
from inference_svc.server.vllm_grpc import require_contract, vllm_listener
from inference_svc.server.worker_config import WorkerConfig
from inference_svc.server.worker_metrics import serve_metrics

# EX_SOFTWARE: the engine has stopped, and only a new process can start another engine.
EXIT_ENGINE_STOPPED = 70
# Grace periods after the engine has stopped: first for errors to reach callers, then for queued saves.
_STOPPED_GRACE_SECONDS, _STOPPED_CLOSE_SECONDS = 2.0, 5.0
_POLL_SECONDS = 0.2
# Time in which this worker refuses new requests before it stops: gateways poll more often and so notice in time.
_REFUSE_SECONDS = 1.5
# Minimum of the concurrent calls on one connection.
_STREAMS = 4096
SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

log = structlog.get_logger("worker")


async def serve(config: WorkerConfig) -> None:
    """Run a worker until SIGTERM or SIGINT, or until its engine stops. A second signal ends its draining.

    If the engine stops, the process exits with EXIT_ENGINE_STOPPED. Raises ConfigurationError, ModelUnsupported.
    """
    raise_descriptor_limit()
    ensure_private_dir(config.socket.parent)
    stop, at_once = asyncio.Event(), asyncio.Event()
    stop_on_signals(stop, at_once)
    disable_bars_off_terminal()
    if config.vllm_grpc:
        require_contract()
    config.socket.unlink(missing_ok=True)  # the socket of a killed worker must not look alive while this one loads
    log.info("loading the model", model=config.model)
    # Set up before the runtime, so that calls to the daemon have a span.
    async with otlp_providers(SERVICE_NAME, config.otlp_endpoint) as providers:
        runtime = await _build_or_exit(config, stop)
        try:
            if not stop.is_set():
                await _serve(config, runtime, stop, at_once, providers)
        finally:
            await _close(runtime)


async def _close(runtime: Runtime) -> None:
    """Close a runtime. If its engine has stopped, exit the process, because its device may hang."""
    closing = asyncio.ensure_future(asyncio.to_thread(runtime.close))
    died = runtime.engine.died
    await asyncio.wait({closing}, timeout=_STOPPED_CLOSE_SECONDS if died.done() else None)
    if died.done():
        log.error("ending this worker, so that it is started again", reason=str(died.result()))
        os._exit(EXIT_ENGINE_STOPPED)
    closing.result()


async def _build_or_exit(config: WorkerConfig, stop: asyncio.Event) -> Runtime:
    """Build the runtime; exit the process if ``stop`` is set meanwhile.

    A large model takes minutes to load, and the loading thread cannot be stopped. An exit is safe, because the files
    that this thread writes are created atomically.
    """
    building, stopped = (
        asyncio.ensure_future(asyncio.to_thread(build_runtime, config)),
        asyncio.ensure_future(stop.wait()),
    )
    await asyncio.wait({building, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not building.done():
        log.info("stopping, with the model not loaded yet")
        os._exit(0)
    stopped.cancel()
    return building.result()


async def _serve(
    config: WorkerConfig,
    runtime: Runtime,
    stop: asyncio.Event,
    at_once: asyncio.Event,
    providers: OtelProviders | None,
) -> None:
    observer = OtelObserver(providers, runtime.engine.loaded.id) if providers is not None else NOOP
    service = InferenceService(runtime, observer)
    others = (vllm_listener(config.vllm_grpc, service, runtime, observer, stop),) if config.vllm_grpc else ()
    health = HealthService()
    async with serve_endpoint(
        Endpoint(
            SERVICE,
            config.socket,
            config.tcp,
            health_tcp=config.health_tcp,
            others=others,
            # Twice the requests that can run and wait: further ones are refused (429) and do not wait at the client.
            streams=max(_STREAMS, 2 * (config.batch_sequences + config.max_waiting)),
            refuse_seconds=min(_REFUSE_SECONDS, config.drain_seconds),
        ),
        lambda server: add_InferenceServiceServicer_to_server(service, server),
        lambda: _STOPPED_GRACE_SECONDS if runtime.engine.died.done() else config.drain_seconds,
        health,
        at_once,
    ) as addresses:
        if config.metrics_port:
            serve_metrics(runtime, config.metrics_port, config.metrics_host)
        loaded = runtime.engine.loaded
        log.info(
            "serving",
            model=loaded.id,
            socket=str(config.socket),
            device=str(loaded.device),
            dtype=str(loaded.dtype),
            pool_tokens=runtime.engine.pool.pages * PAGE_TOKENS,
            cache=runtime.cache is not None and runtime.cache.attached,
            **({"vllm_grpc": addresses[-1]} if others else {}),
        )
        runtime.start_verification()
        names = {"", SERVICE, *(door.service for door in others)}
        await _watch_engine(runtime.engine, health, names, stop)
        log.info("stopping")


async def _watch_engine(engine: Engine, health: HealthService, names: Collection[str], stop: asyncio.Event) -> None:
    """Update the health status from the engine, until ``stop`` or until the engine stops."""
    stopped, ailed = asyncio.ensure_future(stop.wait()), False
    while not stopped.done() and not engine.died.done():
        await asyncio.wait({stopped}, timeout=_POLL_SECONDS)
        ailment = engine.ailment
        if bool(ailment) != ailed:
            ailed = bool(ailment)
            status = HealthCheckResponse.NOT_SERVING if ailed else HealthCheckResponse.SERVING
            for name in names:
                await health.set(name, status)
            if ailed:
                log.error("not serving", reason=ailment)
            else:
                log.info("serving again")
    stopped.cancel()
