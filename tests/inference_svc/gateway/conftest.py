"""A node of two workers and its gateway, which all tests of this folder share."""

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
    """Gateway process with these flags, on ``port`` or on a free port. Its log goes to the log of ``node``."""

    def __init__(self, node: Node, *flags: str, port: int = 0, wait: bool = True) -> None:
        self.port, self.node = port or free_port(), node
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = Node.launch(
            ["inference_svc", "gateway", "--port", str(self.port), *flags], dict(os.environ), node.log.fileno()
        )
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="k", max_retries=0)
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the gateway has a live worker or node."""
        deadline = time.monotonic() + 90
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            assert time.monotonic() < deadline, self.node.read_log()
            time.sleep(0.05)

    def post(self, path: str, **body: Any) -> Any:
        """Send a request, whose answer must have the status 200; return the answer's JSON."""
        answer = httpx.post(f"{self.url}{path}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        assert self.process.wait(60) in (0, -15)


def of_node(node: Node, *flags: str, port: int = 0, wait: bool = True) -> Gateway:
    """The gateway in front of the node's workers."""
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
    """A gateway with the API key ``guest`` and the operator key ``chief``."""
    found = of_node(two, "--api-key", "guest", "--operator-key", "chief")
    yield found
    found.close()
