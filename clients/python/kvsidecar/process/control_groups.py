"""Control groups of this process, which limit its memory and CPU time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_STATUS = Path("/proc/self/cgroup")


def control_groups(controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folders of this process's groups of a controller, the innermost first, with their cgroup version."""
    for line in lines_of(_STATUS):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            tops, version = [_GROUPS, _GROUPS / "unified"], 2
        elif controller in controllers.split(","):
            tops, version = [_GROUPS / controller], 1
        else:
            continue
        for top in tops:
            group = top / path.lstrip("/")
            # In a container, the container's own group is mounted at the top, under another name than outside.
            for folder in (group, *group.parents) if group.is_dir() else (top,):
                if not folder.is_relative_to(top):
                    break
                yield folder, version


def lines_of(path: Path) -> list[str]:
    """Return the lines of a group's file; none if the kernel does not have it."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
