"""Provenance of a result: commit, time, machine load and command."""

from __future__ import annotations

import datetime
import os
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent.parent
_STARTED = datetime.datetime.now(datetime.UTC)
_LOAD = os.getloadavg()


@dataclass(frozen=True)
class Provenance:
    """Provenance of a run.

    ``date`` and ``load_before`` are those at the import of this module. Without a git repository, ``commit`` is empty
    and ``dirty`` is None.
    """

    commit: str
    dirty: bool | None
    date: str
    seconds: float
    load_before: tuple[float, float, float]
    load_after: tuple[float, float, float]
    command: str

    @classmethod
    def now(cls) -> Provenance:
        """Return the provenance of this run."""
        commit, changed = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
        took = (datetime.datetime.now(datetime.UTC) - _STARTED).total_seconds()
        return cls(
            commit=commit or "",
            dirty=None if commit is None or changed is None else bool(changed),
            date=_STARTED.isoformat(timespec="seconds"),
            seconds=round(took, 1),
            load_before=_LOAD,
            load_after=os.getloadavg(),
            command=_command(),
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _git(*arguments: str) -> str | None:
    """Return git's output for the repository; None if git fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _command() -> str:
    """Return the command line, without paths that exist only on this machine."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    pairs = pairwise(["", *sys.argv[1:]])
    arguments = [one for before, one in pairs if "--out" not in (before, one) and not one.startswith("--out=")]
    if spec is None:
        return shlex.join([Path(sys.argv[0]).name, *arguments])
    return shlex.join(["python", "-m", spec.name.removesuffix(".__main__"), *arguments])
