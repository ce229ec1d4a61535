"""Lists the tests that may be run a second time: ``python -m tests.flaky``.

Such a test has the marker ``@pytest.mark.flaky(reason="…", since="2026-11-25")``; if it fails, pytest-rerunfailures
runs it once more. No other test is run again, nor a test that crashed. The exit status is 1 if a marker lacks reason or
date, or if there are too many markers.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path

FOLDER = Path(__file__).parent
MAX_FLAKY = 10


@dataclass(frozen=True)
class FlakyMarker:
    """A flaky marker in a source file. ``problem`` is empty if the marker is valid."""

    place: str
    reason: str
    since: str
    problem: str


def markers(path: Path, place: str) -> Iterator[FlakyMarker]:
    """Return all flaky markers of a source file: those of modules, classes, functions and parameters."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or ast.unparse(node) != "pytest.mark.flaky":
            continue
        given: dict[str, object] = {}
        if (call := calls.get(id(node))) is not None:
            for keyword in call.keywords:
                given[keyword.arg or "**"] = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if call.args:
                given["a positional argument"] = None
        yield _marker(f"{place}:{node.lineno}", given)


def _marker(place: str, given: dict[str, object]) -> FlakyMarker:
    reason, since = given.get("reason"), given.get("since")
    problem = ""
    if set(given) != {"reason", "since"}:
        problem = f"takes reason and since, has {', '.join(given) or 'nothing'}"
    elif not (isinstance(reason, str) and reason.strip()):
        problem = "its reason is no text"
    else:
        try:
            if date.fromisoformat(str(since)) > datetime.now(UTC).date():
                problem = f"since {since} is in the future"
        except ValueError:
            problem = f"since is {since!r}; write a date like 2026-11-25"
    return FlakyMarker(place, str(reason or ""), str(since or ""), problem)


def all_markers(folder: Path = FOLDER) -> list[FlakyMarker]:
    found: list[FlakyMarker] = []
    for path in sorted(folder.rglob("*.py")):
        found += markers(path, str(path.relative_to(folder.parent)))
    return found


def main(folder: Path = FOLDER) -> int:
    found = all_markers(folder)
    print(f"{len(found)} tests may be flaky, at most {MAX_FLAKY}")
    for one in found:
        print(f"  {one.place} since {one.since}: {one.problem.upper() or one.reason}")
    return int(len(found) > MAX_FLAKY or any(one.problem for one in found))


if __name__ == "__main__":
    sys.exit(main())
