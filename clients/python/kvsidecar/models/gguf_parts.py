"""Names of GGUF files that ``llama-gguf-split`` divided: NAME-00001-of-00003.gguf."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>(?!00000)\d{5})\.gguf")
_PROJECTOR = "mmproj"


def part_names(name: str) -> list[str]:
    """Return the names of all parts of a divided file, given the name of one part; the name itself for a whole file."""
    found = _PART.fullmatch(name)
    if found is None:
        return [name]
    return [f"{found['name']}-{i:05}-of-{found['count']}.gguf" for i in range(1, int(found["count"]) + 1)]


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of a file, existing or not."""
    return [path.with_name(name) for name in part_names(path.name)]


def first_parts(names: Iterable[str]) -> list[str]:
    """Return one name per model: the names of whole files, and of first parts. An image projector is no model."""
    return sorted(name for name in names if part_names(name)[0] == name and _PROJECTOR not in name.lower())
