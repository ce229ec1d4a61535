"""A real daemon process, and a small client of its protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.node import Node
from benchmarks.peer import GEOMETRY, Peer, descriptor, payload_of

__all__ = ["GEOMETRY", "Peer", "code_of", "descriptor", "payload_of", "store_file"]


@pytest.fixture
def start() -> Iterator[Callable[..., Node]]:
    """Return a function that starts nodes without workers; the nodes end with the test."""
    with ExitStack() as stack:

        def launch(**flags: Any) -> Node:
            arena = flags.pop("arena_bytes", "4MiB")
            return stack.enter_context(Node(workers=0, arena_bytes=arena, daemon_flags=flags))

        yield launch


@pytest.fixture
def daemon(start: Callable[..., Node]) -> Node:
    return start(heartbeat_ms=200)


@pytest.fixture
def peer(daemon: Node) -> Iterator[Peer]:
    found = Peer(daemon)
    yield found
    found.close()


def code_of(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    """Return the status and the message of a call that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details() or ""


def store_file(node: Node) -> Path:
    return node.folder / "store" / "data.mdb"
