"""Rows, which are the results of first contact, and the file to which a step appends them."""

from __future__ import annotations

import json
import math
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One result. ``passed`` is None for a measurement without a limit.

    ``fake`` names the parts that a double replaced. ``speedup`` is the reference's time divided by ours, so below 1 if
    ours is slower. It is None without a reference, or if parts are fake.
    """

    case: str
    passed: bool | None = None
    value: str = ""
    reference: str = ""
    speedup: float | None = None
    fake: str = ""


class RowFile:
    """File of one step's rows. Each row is written at once, so that a killed step keeps its earlier rows."""

    def __init__(self, path: Path, fake: str = "") -> None:
        self._path, self._fake = path, fake

    def add(self, row: Row) -> None:
        """Append a row, marked with the step's fake parts."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**asdict(row), "fake": self._fake}) + "\n")

    def measured(self, case: str, value: str, reference: str = "", speedup: float | None = None) -> None:
        """Append a measurement without a limit."""
        known = speedup is not None and not self._fake
        self.add(Row(case, None, value, reference, round(speedup or 0.0, 3) if known else None))

    def within(self, case: str, error: float, limit: float) -> None:
        """Append an error with its limit; the row passes if the error is within the limit. NaN fails."""
        passed = not math.isnan(error) and error <= limit
        self.add(Row(case, passed, f"error {error:.1e}", f"at most {limit:.1e}"))

    def passed(self, case: str, value: str = "", reference: str = "") -> None:
        self.add(Row(case, True, value, reference))

    def failed(self, case: str, reason: str) -> None:
        self.add(Row(case, False, reason))

    def raised(self, case: str, error: Exception) -> None:
        """Append a failed row for an exception, and print its traceback, which the runner keeps in its log."""
        print(f"---- {case} ----", file=sys.stderr)
        traceback.print_exception(error)
        self.failed(case, f"{type(error).__name__}: {str(error)[-300:]}")

    def read(self) -> list[Row]:
        """Return the rows. Ignores a last line that is cut off because the step was killed."""
        if not self._path.exists():
            return []
        rows = []
        for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                rows.append(Row(**json.loads(line)))
        return rows
