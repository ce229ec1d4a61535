"""Memory that this process may still allocate, within machine and control group limits.

Imports no torch, so that commands can check before they load it.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_GROUPS = Path("/sys/fs/cgroup")
_STATUS = Path("/proc/self/cgroup")


def free_bytes(allowed: int = 0) -> int:
    """Return the bytes that this process may still allocate.

    This is the minimum over the machine, its control groups and, if not 0, ``allowed`` for the whole process. Page
    cache counts as free.
    """
    found = [int(psutil.virtual_memory().available), *_of_groups()]
    if allowed:
        found.append(allowed - resident_bytes())
    return max(0, min(found))


def resident_bytes() -> int:
    """Return the process's resident set size, mapped files included."""
    return int(psutil.Process().memory_info().rss)


def _of_groups() -> list[int]:
    """Return the free bytes of each memory control group of this process.

    Reads both cgroup versions.
    """
    found = []
    for line in _lines(_STATUS):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            tops = [_GROUPS, _GROUPS / "unified"]
            names = ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            tops, names = [_GROUPS / "memory"], ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for top in tops:
            group = top / path.lstrip("/")
            # In a container, its own group is mounted at the top, whatever its name outside.
            for folder in (group, *group.parents) if group.is_dir() else (top,):
                if not folder.is_relative_to(top):
                    break
                left = _left(folder, *names)
                if left is not None:
                    found.append(left)
    return found


def _left(folder: Path, limit: str, usage: str) -> int | None:
    texts = ["".join(_lines(folder / name)) for name in (limit, usage)]
    if not all(text.isdigit() for text in texts):
        return None  # there is no limit ("max"), or no such group
    most, used = map(int, texts)
    cached = {name: int(n) for name, n in (line.split() for line in _lines(folder / "memory.stat"))}
    # Version 1 counts nested groups under separate names.
    files = sum(cached.get(f"total_{name}", cached.get(name, 0)) for name in ("inactive_file", "active_file"))
    return most - used + files


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return []
