"""Memory that this process may still allocate, within machine and control group limits.

Does not import torch, so that commands can check memory before they load torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_GROUPS = Path("/sys/fs/cgroup")
_STATUS = Path("/proc/self/cgroup")


def free_bytes(allowed: int = 0) -> int:
    """Return the bytes that this process may still allocate.

    This is the minimum over the machine, the process's control groups and, if it is not 0, the limit ``allowed`` of the
    whole process. Page cache counts as free.
    """
    found = [int(psutil.virtual_memory().available), *_of_groups()]
    if allowed:
        found.append(allowed - resident_bytes())
    return max(0, min(found))


def resident_bytes() -> int:
    """Return the process's resident set size, mapped files included."""
    return int(psutil.Process().memory_info().rss)


def memory_limit_bytes() -> int:
    """Return the maximal memory of this process: the minimum over the machine and its control groups."""
    limits = [int(psutil.virtual_memory().total)]
    for folder, files in _groups():
        text = "".join(_lines(folder / files.limit))
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def oom_kills() -> int:
    """Return the number of processes in this control group that the kernel killed for lack of memory."""
    for folder, files in _groups():
        for line in _lines(folder / files.events):
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdigit():
                return int(count)
    return 0


@dataclass(frozen=True)
class _GroupFiles:
    """Names of a memory control group's files in one cgroup version."""

    limit: str
    usage: str
    events: str


_V1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control")
_V2 = _GroupFiles("memory.max", "memory.current", "memory.events")


def _groups() -> Iterator[tuple[Path, _GroupFiles]]:
    """Yield this process's memory control groups, the innermost first, in both cgroup versions."""
    for line in _lines(_STATUS):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            tops, files = [_GROUPS, _GROUPS / "unified"], _V2
        elif "memory" in controllers.split(","):
            tops, files = [_GROUPS / "memory"], _V1
        else:
            continue
        for top in tops:
            group = top / path.lstrip("/")
            # In a container, the container's own group is mounted at the top, under another name than outside.
            for folder in (group, *group.parents) if group.is_dir() else (top,):
                if not folder.is_relative_to(top):
                    break
                yield folder, files


def _of_groups() -> list[int]:
    """Return the free bytes of each memory control group of this process."""
    found = (_left(folder, files) for folder, files in _groups())
    return [left for left in found if left is not None]


def _left(folder: Path, files: _GroupFiles) -> int | None:
    texts = ["".join(_lines(folder / name)) for name in (files.limit, files.usage)]
    if not all(text.isdigit() for text in texts):
        return None  # there is no limit ("max"), or no such group
    most, used = map(int, texts)
    cached = {name: int(n) for name, n in (line.split() for line in _lines(folder / "memory.stat"))}
    # Version 1 counts nested groups under separate names.
    cached_files = sum(cached.get(f"total_{name}", cached.get(name, 0)) for name in ("inactive_file", "active_file"))
    return most - used + cached_files


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
