"""The node that all frameworks of ``make test-frameworks`` are tried on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.frameworks.served_node import Server, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("node"), "--claude-names") as found:
        yield found
