"""Pytest plugin that allows a rerun only of tests with a flaky marker, and never after a crash."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_handlecrashitem(crashitem: str, sched: Any) -> None:
    """Forbid the rerun of a test whose worker process died, before pytest-rerunfailures hears of the crash."""
    sched.config.failures_db.set_test_reruns(crashitem, 0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config) -> None:
    if config.getoption("reruns", None):
        raise pytest.UsageError("--reruns runs every test again; mark the flaky ones, with a reason and a date")
