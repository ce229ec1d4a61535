"""Fixtures that drive real processes over real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.node import Node
from inference_svc.model.numerics import make_reproducible

make_reproducible()  # before any test's first product


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-long", action="store_true", help="run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    for item in items:
        if "long" in item.keywords and not config.getoption("--run-long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; pytest --run-long runs it"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none here"))


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """A daemon and one worker with the built-in model, 16-bit storage; shared by a module's tests.

    The worker keeps nothing in its pool: what is reused comes from the daemon.
    """
    flags = {"resident_sequences": 0}
    with Node("demo", arena_bytes="128MiB", pool_bytes="64MiB", worker_flags=flags) as running:
        yield running
