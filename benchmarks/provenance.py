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


@dataclass(frozen=True)
class SourceState:
    """Commit of the working tree. Without a git repository, ``commit`` is empty and ``dirty`` is None."""

    commit: str
    dirty: bool | None

    @classmethod
    def now(cls) -> SourceState:
        commit, changed = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
        return cls(commit or "", None if commit is None or changed is None else bool(changed))


class RunStart:
    """Source, time and load at the start of a run."""

    def __init__(self) -> None:
        self.source, self.load = SourceState.now(), os.getloadavg()
        self.date = datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True)
class Provenance:
    """Provenance of a run.

    ``commit`` is that of the start, because the processes of a run import their code then. A run is also ``dirty`` if
    the working tree was at another commit, or dirty, at its end.
    """

    commit: str
    dirty: bool | None
    date: str
    seconds: float
    load_before: tuple[float, float, float]
    load_after: tuple[float, float, float]
    command: str

    @classmethod
    def since(cls, start: RunStart) -> Provenance:
        """Return the provenance of a run from its start until now."""
        source = start.source
        took = (datetime.datetime.now(datetime.UTC) - start.date).total_seconds()
        return cls(
            commit=source.commit,
            dirty=source.dirty if SourceState.now() == source else True,
            date=start.date.isoformat(timespec="seconds"),
            seconds=round(took, 1),
            load_before=start.load,
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
