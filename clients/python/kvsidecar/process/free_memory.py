"""Memory that this process may still allocate, within machine and control group limits.

Does not import torch, so that commands can check memory before they load torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from kvsidecar.process.control_groups import control_groups, lines_of


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
    for folder, version in control_groups("memory"):
        text = "".join(lines_of(folder / _FILES[version].limit))
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def oom_kills() -> int:
    """Return the number of processes in this control group that the kernel killed for lack of memory."""
    for folder, version in control_groups("memory"):
        for line in lines_of(folder / _FILES[version].events):
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


_FILES = {
    1: _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"),
    2: _GroupFiles("memory.max", "memory.current", "memory.events"),
}


def _of_groups() -> list[int]:
    """Return the free bytes of each memory control group of this process."""
    found = (_left(folder, _FILES[version]) for folder, version in control_groups("memory"))
    return [left for left in found if left is not None]


def _left(folder: Path, files: _GroupFiles) -> int | None:
    texts = ["".join(lines_of(folder / name)) for name in (files.limit, files.usage)]
    if not all(text.isdigit() for text in texts):
        return None  # there is no limit ("max"), or no such group
    most, used = map(int, texts)
    cached = {name: int(n) for name, n in (line.split() for line in lines_of(folder / "memory.stat"))}
    # Version 1 counts nested groups under separate names.
    cached_files = sum(cached.get(f"total_{name}", cached.get(name, 0)) for name in ("inactive_file", "active_file"))
    return most - used + cached_files
