"""The skips that a run may have: ``pytest --strict-skips`` fails for any other one.

``allowed_skips.toml`` has a pattern for each reason, and at most how many tests it may keep away. A tool that CI
installs is not among them, so its absence fails CI rather than dropping tests.
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
    """Skips whose reason matches ``reason`` as a whole: at most ``most`` tests, or modules."""

    reason: re.Pattern[str]
    most: int
    why: str


def allowed_skips(path: Path = ALLOWED) -> list[AllowedSkip]:
    return [
        AllowedSkip(re.compile(entry["reason"], re.S), entry["most"], entry["why"])
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["skip"]
    ]


class SkipPolicy:
    """A pytest plugin that collects skips and, if some are not allowed, fails the session."""

    def __init__(self, allowed: Iterable[AllowedSkip]) -> None:
        self._allowed = list(allowed)
        self._skipped: dict[str, str] = {}  # node id -> reason

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
        """A line for each reason that is not allowed, or that keeps more tests away than it may."""
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
