"""``python -m inference_svc worker|gateway|serve|verify|prepare``: the command lines of the servers."""

from __future__ import annotations

import sys

from kvsidecar.cli.settings import run_service


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    command, rest = (arguments[0] if arguments else ""), arguments[1:]
    if command == "worker":
        from inference_svc.config import WorkerConfig
        from inference_svc.model.preflight import settled

        async def serve(config: WorkerConfig) -> None:
            config = settled(config)
            from inference_svc.server import serve as run  # it imports torch

            await run(config)

        return run_service("kvsidecar worker", WorkerConfig, serve, rest)
    if command == "gateway":
        from inference_svc.gateway.config import GatewayConfig
        from inference_svc.gateway.server import serve as serve_gateway

        return run_service("kvsidecar gateway", GatewayConfig, serve_gateway, rest)
    if command == "serve":
        from inference_svc.supervisor import main as supervise

        return supervise(rest)
    if command == "verify":
        from inference_svc.verify_command import main as verify

        return verify(rest)
    if command == "prepare":
        from inference_svc.model.prepare_command import main as prepare

        return prepare(rest)
    print("usage: python -m inference_svc worker|gateway|serve|verify|prepare [--help]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
