"""States of files, which show whether their contents are those that were read."""

from __future__ import annotations

from pathlib import Path

# Two changes of a file within this time may get the same timestamp, on file systems with coarse clocks.
CLOCK_STEP_NS = 2_000_000_000


def state_of(file: Path) -> dict[str, int]:
    """Return values that change with a file's contents. Programs can set ``modified_ns``, but not ``changed_ns``.

    Raises OSError.
    """
    stat = file.stat()
    return {
        "size_bytes": stat.st_size,
        "modified_ns": stat.st_mtime_ns,
        "changed_ns": stat.st_ctime_ns,
        "inode": stat.st_ino,
    }


def is_settled(file: Path, state: dict[str, int], began_ns: int) -> bool:
    """Return True if a file, read since ``began_ns`` in Unix time, changed neither shortly before that nor since.

    ``state`` is its state before it was read. Raises OSError.
    """
    return began_ns - max(state["modified_ns"], state["changed_ns"]) > CLOCK_STEP_NS and state == state_of(file)
