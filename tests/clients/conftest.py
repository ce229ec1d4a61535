"""Clients in other languages, each built once per run."""

from __future__ import annotations

from functools import cache

import pytest

from tests.clients.toolchains import TOOLCHAINS, Toolchain


@cache
def why_not_built(toolchain: Toolchain) -> str:
    """Builds a client once; what is missing for it, or nothing. Raises AssertionError when it does not compile."""
    missing = toolchain.missing()
    if not missing:
        toolchain.make()
    return missing


@pytest.fixture(params=TOOLCHAINS, ids=lambda t: t.name, scope="module")
def client(request: pytest.FixtureRequest) -> Toolchain:
    toolchain: Toolchain = request.param
    missing = why_not_built(toolchain)
    if missing:
        pytest.skip(f"not installed for {toolchain.name}: {missing}; clients/{toolchain.name}/README.md names packages")
    return toolchain
