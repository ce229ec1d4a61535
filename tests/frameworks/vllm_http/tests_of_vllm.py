"""Chooses vLLM's HTTP tests, and compares their results with the known failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest


class TestsOfVllm:
    """A pytest plugin. ``suites`` has files by the suite's name; ``known`` has reasons by section and test.

    A test in the section ``may_fail`` may pass or fail.
    """

    __test__ = False

    def __init__(self, suites: Mapping[str, list[str]], known: Mapping[str, Mapping[str, str]]) -> None:
        self._suites = {file: name for name, files in suites.items() for file in files}
        self._may_fail = set(known.get("may_fail", ()))
        self._known = {test for tests in known.values() for test in tests} - self._may_fail
        self._results: dict[str, tuple[str, bool]] = {}
        self._complaints: list[str] = []
        self.exit_code = 1

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out tests of vLLM's own classes, and the second copy of tests that a module repeats for an adapter."""
        items[:] = [item for item in items if _reaches_a_server(item) and "zephyr-lora" not in item.name]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, test = report.nodeid.partition("::")
        if report.when == "call" or report.failed:
            self._results[f"{file.rpartition('/')[2]}::{test}"] = (self._suites[file], report.passed)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for test, (_, passed) in self._results.items():
            if test in self._may_fail:
                continue
            if passed and test in self._known:
                self._complaints.append(f"{test} passes: remove it from known_failures.toml")
            elif not passed and test not in self._known:
                self._complaints.append(f"{test} fails")
        if not session.config.option.keyword and not session.config.option.maxfail:
            gone = (self._known | self._may_fail) - self._results.keys()
            self._complaints += [f"{test} did not run: remove it from known_failures.toml" for test in sorted(gone)]
        self.exit_code = int(bool(self._complaints) or not self._results)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        passed = Counter(suite for suite, fine in self._results.values() if fine)
        for suite, number in Counter(suite for suite, _ in self._results.values()).items():
            terminalreporter.write_line(f"{suite}: {passed[suite]} of {number} pass")
        for line in self._complaints:
            terminalreporter.write_line(line)


def _reaches_a_server(item: pytest.Item) -> bool:
    names = getattr(item, "fixturenames", ())
    return "server" in names or "client" in names
