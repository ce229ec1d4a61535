"""Child's end of the socket: lines of JSON over a Unix socket.

The child first sends ``{"ready": {…}}`` with the engine's description. A request is ``{"id", "tokens", "max_tokens",
"salt"}``, ``{"id", "batch", "max_tokens"}`` or ``{"id", "do", …}``. An answer is ``{"id", …}`` or ``{"id", "error"}``.
The module imports only the standard library.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol


class SequentialEngine(Protocol):
    """An engine that answers one prompt, or one batch of prompts, at a time."""

    def tokens(self, prompt: list[int], max_tokens: int) -> Iterator[int]: ...

    def batch(self, prompts: list[list[int]], max_tokens: int) -> Iterator[list[int]]:
        """Answer equally long prompts with a common prefix together. Yields each step's tokens, one per prompt."""
        ...

    @property
    def cached(self) -> int:
        """Number of the last prompt's tokens that were not computed."""
        ...

    def do(self, what: str) -> Any: ...


def connect() -> tuple[socket.socket, dict[str, Any]]:
    """Connect to the parent; return the socket and the options. Both come from the command line."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(sys.argv[1])
    options: dict[str, Any] = json.loads(sys.argv[2])
    return link, options


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def serve(link: socket.socket, about: dict[str, Any], engine: SequentialEngine) -> None:
    """Serve until the parent closes the connection.

    The times of an answer begin when the line of its request has been read.
    """
    link.sendall(line({"ready": about}))
    with link.makefile("rb") as asked:
        for text in asked:
            began = time.perf_counter()
            request = json.loads(text)
            link.sendall(line({"id": request["id"], **_answer(engine, request, began)}))


def _batch_answer(engine: SequentialEngine, request: dict[str, Any], began: float) -> dict[str, Any]:
    steps, first = list[list[int]](), 0.0
    for tokens in engine.batch(request["batch"], request["max_tokens"]):
        first = first or time.perf_counter()
        steps.append(tokens)
    times = {"ttft_ms": (first - began) * 1e3, "total_ms": (time.perf_counter() - began) * 1e3}
    return {"ids": [list(ids) for ids in zip(*steps, strict=True)], "cached": engine.cached, **times}


def _answer(engine: SequentialEngine, request: dict[str, Any], began: float) -> dict[str, Any]:
    try:
        if "do" in request:
            return {"done": engine.do(request["do"])}
        if "batch" in request:
            return _batch_answer(engine, request, began)
        ids, first = [], 0.0
        for token in engine.tokens(request["tokens"], request["max_tokens"]):
            first = first or time.perf_counter()
            ids.append(int(token))
        ttft, total = first - began, time.perf_counter() - began
        return {"ids": ids, "ttft_ms": ttft * 1e3, "total_ms": total * 1e3, "cached": engine.cached}
    except Exception as error:  # the parent raises the error
        return {"error": f"{type(error).__name__}: {error}"}
