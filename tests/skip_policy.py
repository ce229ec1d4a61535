"""Pytest plugin that fails a run with ``--strict-skips`` if a skip is not allowed.

``allowed_skips.toml`` has a pattern for each allowed reason, and the maximum number of tests that it may skip. The file
has no patterns for missing tools that CI installs. If such a tool is missing, CI fails instead of skipping tests.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

ALLOWED = Path(__file__).parent / "allowed_skips.toml"


@dataclass(frozen=True)
class AllowedSkip:
    """An allowed reason: a pattern of the whole text, and the maximum number of tests or modules with it."""

    reason: re.Pattern[str]
    most: int
    why: str


def allowed_skips(path: Path = ALLOWED) -> list[AllowedSkip]:
    return [
        AllowedSkip(re.compile(entry["reason"], re.S), entry["most"], entry["why"])
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["skip"]
    ]


class SkipPolicy:
    """A pytest plugin that collects skips, and fails the session if one is not allowed."""

    def __init__(self, allowed: Iterable[AllowedSkip]) -> None:
        self._allowed = list(allowed)
        self._skipped: dict[str, str] = {}  # reason by the test's node id

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        told = report.longrepr
        reason = str(told[2]) if isinstance(told, tuple) else str(told)
        self._skipped[report.nodeid] = reason.removeprefix("Skipped: ")

    def problems(self) -> list[str]:
        """Return a line for each reason that is not allowed, or that skips more tests than allowed."""
        by_rule: dict[int, list[str]] = defaultdict(list)
        found = []
        for node, reason in self._skipped.items():
            rule = next((i for i, one in enumerate(self._allowed) if one.reason.fullmatch(reason)), None)
            if rule is None:
                found.append(f"{node}: {reason}")
            else:
                by_rule[rule].append(node)
        for rule, nodes in by_rule.items():
            one = self._allowed[rule]
            if len(nodes) > one.most:
                found.append(f"{len(nodes)} skips like {one.reason.pattern!r}, at most {one.most}: {', '.join(nodes)}")
        return found

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and self.problems():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if problems := self.problems():
            terminalreporter.section("skips that are not allowed (tests/allowed_skips.toml)", red=True)
            for line in problems:
                terminalreporter.line(line)
