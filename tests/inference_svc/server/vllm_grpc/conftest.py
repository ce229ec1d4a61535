"""A node whose worker serves vLLM's gRPC API, and a client of this API."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from benchmarks.node import Node, free_port


@dataclass(frozen=True)
class Door:
    """A client of vLLM's gRPC API, and the worker that serves the API."""

    node: Node
    address: str
    channel: grpc.Channel
    stub: Any

    def ask(self, **fields: Any) -> list[Any]:
        """Call Generate; return the messages of the answer."""
        from smg_grpc_proto import vllm_engine_pb2

        return list(self.stub.Generate(vllm_engine_pb2.GenerateRequest(**fields), timeout=120))


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    from smg_grpc_proto import vllm_engine_pb2_grpc

    address = f"127.0.0.1:{free_port()}"
    flags = {"vllm_grpc": address, "resident_sequences": 0}
    with (
        Node("demo", arena_bytes="128MiB", pool_bytes="64MiB", worker_flags=flags) as node,
        grpc.insecure_channel(address) as channel,
    ):
        yield Door(node, address, channel, vllm_engine_pb2_grpc.VllmEngineStub(channel))
