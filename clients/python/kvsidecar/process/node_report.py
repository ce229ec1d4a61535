"""Status files of a running node, written by the supervisor of ``kvsidecar serve``.

The supervisor locks ``serve.lock``, which describes the node. ``serve.state`` has a report on each process, rewritten
at every change.
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
class NodeReport:
    """A supervised node: supervisor's process id, gateway's URL, workers, and whether it has a daemon."""

    pid: int
    url: str
    workers: int
    cache: bool


@dataclass(frozen=True)
class ProcessReport:
    """Report on one process of a node.

    ``state`` is ``starting`` until the process first reports that it serves, also after a restart; then it is
    ``serving``, or ``silent`` while the process does not respond.
    """

    state: str = STARTING
    deaths: int = 0
    """Number of restarts after it ended by itself."""
    kills: int = 0
    """Number of restarts after it was killed for not responding."""
    oom_kills: int = 0
    """Number of restarts after the kernel killed it for lack of memory."""


def write_node_report(lock: TextIO, node: NodeReport) -> None:
    """Write the report into the lock file; it replaces an earlier node's report. Raises OSError."""
    os.ftruncate(lock.fileno(), 0)
    os.pwrite(lock.fileno(), json.dumps(asdict(node)).encode(), 0)


def find_node(folder: Path) -> NodeReport | None:
    """Return the node that runs in a folder; None without a node, or for another user's node.

    The file outlives its process, and testing the lock could prevent a starting node from getting it. So this function
    checks whether the process with the id in the file has the file open.
    """
    import psutil  # lazy: most commands do not need it

    path = folder / LOCK
    with contextlib.suppress(OSError, ValueError, TypeError, psutil.Error):
        node = NodeReport(**json.loads(path.read_text(encoding="utf-8")))
        if any(Path(file.path) == path.resolve() for file in psutil.Process(node.pid).open_files()):
            return node
    return None


def write_reports(folder: Path, reports: Mapping[str, ProcessReport]) -> None:
    """Atomically replace the reports; this process is the supervisor. Raises OSError."""
    new = folder / f"{STATE}.new"
    content = {"pid": os.getpid(), "processes": {name: asdict(report) for name, report in reports.items()}}
    new.write_text(json.dumps(content), encoding="utf-8")
    new.replace(folder / STATE)


def read_reports(folder: Path, supervisor: int) -> dict[str, ProcessReport]:
    """Return the reports of the supervisor with that process id, by process name; empty without any."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        found = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if found["pid"] == supervisor:
            return {name: ProcessReport(**report) for name, report in found["processes"].items()}
    return {}
