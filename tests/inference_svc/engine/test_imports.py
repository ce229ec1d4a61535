"""The engine's files: none too long to read, and none that needs one that needs it."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import inference_svc.engine

FOLDER = Path(inference_svc.engine.__file__).parent
PACKAGE = "inference_svc.engine."


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(FOLDER).with_suffix("").parts)


def needs(path: Path) -> set[str]:
    """The files of the engine that one imports, for types too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE.rstrip("."):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            found.add((node.module or "").removeprefix(PACKAGE))
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix(PACKAGE) for a in node.names if a.name.startswith(PACKAGE)}
    return found


def test_no_file_of_the_engine_needs_one_that_needs_it() -> None:
    files = {name_of(path): needs(path) for path in FOLDER.rglob("*.py")}
    assert len(list(TopologicalSorter(files).static_order())) >= len(files) > 10


def test_no_file_of_the_engine_is_longer_than_400_lines() -> None:
    assert [p.name for p in FOLDER.rglob("*.py") if len(p.read_text().splitlines()) > 400] == []
