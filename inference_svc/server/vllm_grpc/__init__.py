"""vLLM's gRPC contract, implemented with the worker's service.

It serves routers such as smg. Imports the other modules of ``server``. The optional package smg-grpc-proto contains the
contract; only this ``__init__`` can be imported without that package.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvsidecar.errors import ConfigurationError
from kvsidecar.net.addresses import parse_tcp
from kvsidecar.net.grpc_server import Listener

from inference_svc.server.otel_observer import RequestObserver
from inference_svc.server.runtime import Runtime

if TYPE_CHECKING:
    from inference_svc.server.inference_service import InferenceService


def require_contract() -> None:
    """Raise ConfigurationError if the contract's package is missing or incompatible."""
    try:
        import msgspec  # noqa: F401
        from smg_grpc_proto import vllm_engine_pb2_grpc  # noqa: F401
    except (ImportError, RuntimeError) as error:
        raise ConfigurationError(
            f"vllm_grpc is set, and the contract cannot be read ({error}); run: pip install 'kvsidecar[vllm-grpc]'"
        ) from error


def vllm_listener(
    address: str, service: InferenceService, runtime: Runtime, observer: RequestObserver, stop: asyncio.Event
) -> Listener:
    """Create a listener that serves the contract at ``host:port``; ``stop`` ends its event subscriptions."""
    from smg_grpc_proto import vllm_engine_pb2_grpc

    from inference_svc.server.vllm_grpc.vllm_engine_service import SERVICE, VllmEngine

    engine = VllmEngine(service, runtime, observer, stop)
    return Listener(
        parse_tcp(address),
        lambda server: vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(engine, server),
        service=SERVICE,
    )
