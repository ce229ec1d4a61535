"""Skips the tests of an engine that is neither installed nor fetched."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.node import Node
from tests.integrations.pools import LMCACHE, SGLANG

_MISSING = {
    "vllm": "vLLM is not installed; make test-vllm runs it",
    "sglang": "SGLang was not fetched; make test-sglang runs it",
    "lmcache": "LMCache was not fetched; make test-lmcache runs it",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there = {"vllm": importlib.util.find_spec("vllm") is not None, "sglang": bool(SGLANG), "lmcache": bool(LMCACHE)}
    for item in items:
        for name, reason in _MISSING.items():
            if not there[name] and item.get_closest_marker(name) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(workers=0, arena_bytes="8MiB", daemon_flags={"heartbeat_ms": 5000}) as running:
        yield running


@pytest.fixture
def engines() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
