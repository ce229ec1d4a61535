"""The node that the tests of all frameworks use (``make test-frameworks``)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.frameworks.served_node import Server, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("node"), "--claude-names") as found:
        yield found
