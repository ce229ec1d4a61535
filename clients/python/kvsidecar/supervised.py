"""What ``kvsidecar serve`` says of its node while it runs, in the file that it holds locked."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

LOCK = "serve.lock"


@dataclass(frozen=True)
class Supervised:
    """A node with a supervisor: its process, where its gateway listens, how many workers it has, and whether it has a
    cache daemon of its own."""

    pid: int
    url: str
    workers: int
    cache: bool


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
