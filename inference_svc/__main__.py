"""``python -m inference_svc worker|gateway|serve|size|verify|quantize|prepare``: the command lines of the servers."""

from __future__ import annotations

import gc
import sys

from kvsidecar.extras import refusal
from kvsidecar.process.cpus import limit_openmp_spinning
from kvsidecar.process.fast_import import fast_imports, gc_paused, skip_optional_imports
from kvsidecar.process.sigint import EXIT_CODE
from kvsidecar.process.standard_streams import open_standard_streams


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    open_standard_streams()
    limit_openmp_spinning()
    try:
        return _run(arguments[0] if arguments else "", arguments[1:])
    except KeyboardInterrupt:
        return EXIT_CODE


def _run(command: str, rest: list[str]) -> int:
    if refused := refusal(command):
        print(refused, file=sys.stderr)
        return 2
    with fast_imports():
        skip_optional_imports()
        from kvsidecar.cli.service_settings import run_service
    if command == "worker":
        with fast_imports():
            from inference_svc.models.weight_prefetch import prefetch_weights
            from inference_svc.server.daemon_address import daemon_address
            from inference_svc.server.preflight import checked_settings
            from inference_svc.server.worker_config import WorkerConfig

        async def serve(config: WorkerConfig) -> None:
            config = checked_settings(config)
            daemon_address(config)
            prefetch_weights(config.model)
            with gc_paused():
                from inference_svc.server.worker_server import serve as run  # it imports torch

            await run(config)

        return run_service("kvsidecar worker", WorkerConfig, serve, rest)
    if command == "gateway":
        with fast_imports():
            from inference_svc.gateway.gateway_config import GatewayConfig
            from inference_svc.gateway.gateway_server import serve as serve_gateway

        return run_service("kvsidecar gateway", GatewayConfig, serve_gateway, rest)
    if command == "serve":
        with fast_imports():
            from inference_svc.node.supervisor import main as supervise

        return supervise(rest)
    if command == "size":
        from inference_svc.models.size_command import main as size

        return size(rest)
    if command == "verify":
        with fast_imports():
            from inference_svc.server.verify_command import main as verify

        return verify(rest)
    if command == "quantize":
        with fast_imports():
            from inference_svc.quantize.quantize_command import main as quantize

        return quantize(rest)
    if command == "prepare":
        with fast_imports():
            from inference_svc.models.prepare_command import main as prepare

        return prepare(rest)
    print("usage: python -m inference_svc worker|gateway|serve|size|verify|quantize|prepare [--help]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        # The interpreter ends with a collection of everything that was imported: 2 s, with torch and transformers.
        gc.freeze()
