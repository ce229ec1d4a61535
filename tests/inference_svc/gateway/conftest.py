"""Two workers with a gateway in front, shared by all that is asked of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from benchmarks.node import Node, free_port


class Gateway:
    """A gateway's process with these flags on a port of its own, or on ``port``; ``node`` has its log."""

    def __init__(self, node: Node, *flags: str, port: int = 0, wait: bool = True) -> None:
        self.port, self._node = port or free_port(), node
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = Node.launch(
            ["inference_svc", "gateway", "--port", str(self.port), *flags], dict(os.environ), node.log.fileno()
        )
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="k", max_retries=0)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until it has somebody to answer."""
        deadline = time.monotonic() + 90
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            assert time.monotonic() < deadline, self._node.read_log()
            time.sleep(0.05)

    def post(self, path: str, **body: Any) -> Any:
        """Return the JSON of an answer, which must be 200."""
        answer = httpx.post(f"{self.url}{path}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        assert self.process.wait(60) in (0, -15)


def of_node(node: Node, *flags: str, port: int = 0, wait: bool = True) -> Gateway:
    """The gateway of a node's workers."""
    workers = ",".join(str(node.worker_socket(i)) for i in range(node.workers))
    return Gateway(node, "--workers", workers, "--cache-socket", str(node.cache_socket), *flags, port=port, wait=wait)


@pytest.fixture(scope="package")
def two() -> Iterator[Node]:
    flags = {"chunking": "document", "reuse_anywhere": True, "unverified_reuse": True}
    with Node("demo", workers=2, arena_bytes="64MiB", pool_bytes="64MiB", worker_flags=flags) as node:
        yield node


@pytest.fixture(scope="package")
def gateway(two: Node) -> Iterator[Gateway]:
    found = of_node(two)
    yield found
    found.close()


@pytest.fixture(scope="package")
def locked(two: Node) -> Iterator[Gateway]:
    """One with keys: ``guest`` and ``chief``."""
    found = of_node(two, "--api-key", "guest", "--operator-key", "chief")
    yield found
    found.close()
