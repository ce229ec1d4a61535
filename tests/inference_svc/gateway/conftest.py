"""Two workers with a gateway in front, shared by all that is asked of it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from benchmarks.node import Node, free_port


class Gateway:
    def __init__(self, node: Node, *flags: str) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        workers = ",".join(str(node.worker_socket(i)) for i in range(node.workers))
        command = [sys.executable, "-m", "inference_svc", "gateway", "--port", str(port), "--workers", workers]
        command += ["--cache-socket", str(node.cache_socket), *flags]
        self.process = subprocess.Popen(command, stderr=node.log)
        deadline = time.monotonic() + 30
        while True:
            try:
                if httpx.get(f"{self.url}/health", timeout=1).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            assert time.monotonic() < deadline, node.read_log()
            time.sleep(0.05)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="k", max_retries=0)

    def close(self) -> None:
        self.client.close()
        self.process.terminate()
        assert self.process.wait(20) in (0, -15)


@pytest.fixture(scope="package")
def two() -> Iterator[Node]:
    flags = {"chunking": "document", "approximate": "always"}
    with Node("demo", workers=2, arena_bytes="64MiB", pool_bytes="64MiB", worker_flags=flags) as node:
        yield node


@pytest.fixture(scope="package")
def gateway(two: Node) -> Iterator[Gateway]:
    found = Gateway(two)
    yield found
    found.close()


@pytest.fixture(scope="package")
def locked(two: Node) -> Iterator[Gateway]:
    """One with keys: ``guest`` and ``chief``."""
    found = Gateway(two, "--api-key", "guest", "--operator-key", "chief")
    yield found
    found.close()
