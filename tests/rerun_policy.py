"""Which tests pytest-rerunfailures may run again: those with a flaky marker, and never after a crash."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_handlecrashitem(crashitem: str, sched: Any) -> None:
    """A worker process died in this test: the plugin, which hears of it next, has no rerun left for it."""
    sched.config.failures_db.set_test_reruns(crashitem, 0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config) -> None:
    if config.getoption("reruns", None):
        raise pytest.UsageError("--reruns runs every test again; mark the flaky ones, with a reason and a date")
