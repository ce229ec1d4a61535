"""The node of ``kvsidecar serve`` as its supervisor describes it while it runs.

The file ``serve.lock``, which the supervisor holds locked, names the node. ``serve.state`` has a report on each
process, written anew whenever that changes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

LOCK, STATE = "serve.lock", "serve.state"
STARTING, SERVING, SILENT = "starting", "serving", "silent"


@dataclass(frozen=True)
class Supervised:
    """A node with a supervisor: its process, where its gateway listens, how many workers it has, and whether it has a
    cache daemon of its own."""

    pid: int
    url: str
    workers: int
    cache: bool


@dataclass(frozen=True)
class ProcessReport:
    """One process of a node. ``state`` is ``starting`` until it first says that it serves, also when it was started
    again; then ``serving``, or ``silent`` while it does not say so."""

    state: str = STARTING
    deaths: int = 0
    """How often it was started again because it had ended."""
    kills: int = 0
    """How often it was killed and started again because it had been silent for too long."""


def tell(lock: TextIO, node: Supervised) -> None:
    """Writes it into the lock's file, over what an earlier node wrote."""
    lock.seek(0)
    lock.truncate()
    lock.write(json.dumps(asdict(node)))
    lock.flush()


def supervised(folder: Path) -> Supervised | None:
    """The node that runs in a folder; None where none does, or where that is another user's.

    The file outlives its process. Asking for the lock could keep a node that starts just now from having it, so this
    asks the kernel which files the process of that id has open.
    """
    import psutil  # here: most commands do without

    path = folder / LOCK
    with contextlib.suppress(OSError, ValueError, TypeError, psutil.Error):
        node = Supervised(**json.loads(path.read_text(encoding="utf-8")))
        if any(Path(file.path) == path.resolve() for file in psutil.Process(node.pid).open_files()):
            return node
    return None


def write_reports(folder: Path, reports: Mapping[str, ProcessReport]) -> None:
    """Replaces the reports of this process, the supervisor, so that readers see all of them. Raises OSError."""
    new = folder / f"{STATE}.new"
    content = {"pid": os.getpid(), "processes": {name: asdict(report) for name, report in reports.items()}}
    new.write_text(json.dumps(content), encoding="utf-8")
    new.replace(folder / STATE)


def read_reports(folder: Path, supervisor: int) -> dict[str, ProcessReport]:
    """What the supervisor of that process id says of its processes, by name; empty where it says nothing."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        found = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if found["pid"] == supervisor:
            return {name: ProcessReport(**report) for name, report in found["processes"].items()}
    return {}
