"""A worker with fixed answers, for limits that a real model does not reach."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.inference.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)

LONG_TEXT = "0123456789abcdef" * (5 << 16)
"""5 MiB: more than gRPC's default limit of 4 MiB."""


class ScriptedWorker(InferenceServiceServicer):
    """Answers the prompt "long" with ``LONG_TEXT``, others with an empty text. A context manager.

    A stream has three chunks at once: "0", "1" and "2". Every text has the tokens 1 and 2; those of "wait" come only at
    the worker's end.
    """

    def __init__(self, port: int) -> None:
        self.first_call: float | None = None
        """Monotonic time."""
        self.max_tokens: dict[str, int] = {}
        """By prompt."""
        self._ended = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))
        add_InferenceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"127.0.0.1:{port}")

    def __enter__(self) -> ScriptedWorker:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.stop(None).wait()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        self.first_call = self.first_call or time.monotonic()
        self.max_tokens[request.prompt.text] = request.max_tokens
        return pb.GenerateResponse(text=LONG_TEXT if request.prompt.text == "long" else "")

    def GenerateStream(self, request: pb.GenerateStreamRequest, context: Any) -> Iterator[pb.GenerateStreamResponse]:
        for i in range(3):
            yield pb.GenerateStreamResponse(text=str(i))

    def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        if request.prompt.text == "wait":
            self._ended.wait(30)
        return pb.TokenizeResponse(token_ids=[1, 2])
