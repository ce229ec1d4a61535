"""Pytest plugin that stops a test's time limit while pytest reports a failure, and sets it again for the teardown."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

_SETTINGS = pytest.StashKey[Any]()
_STOPPED = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    item.stash[_SETTINGS] = settings


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Stop the timer before pytest formats a failure: an exception of its alarm there would end the whole run."""
    if call.excinfo is not None and _SETTINGS in item.stash:
        item.config.hook.pytest_timeout_cancel_timer(item=item)
        item.stash[_STOPPED] = True
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    if item.stash.get(_STOPPED, False):
        item.config.hook.pytest_timeout_set_timer(item=item, settings=item.stash[_SETTINGS])
    yield
