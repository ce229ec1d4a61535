"""Lists the tests that may be run a second time: ``python -m tests.flaky``.

Such a test carries ``@pytest.mark.flaky(reason="…", since="2026-11-25")``; pytest-rerunfailures runs it once more when
it fails. No other test is retried, and no crash. Ends with 1 for a marker without reason or date, or too many of them.
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
    """A marker in a source file; ``problem`` is empty for a valid one."""

    place: str
    reason: str
    since: str
    problem: str


def markers(path: Path, place: str) -> Iterator[FlakyMarker]:
    """All flaky markers of a source file, whatever they are put on."""
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
