"""The vocabulary of docs/glossary.md, in names and in first lines of docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("cache_daemon", "inference_svc", "clients/python/kvsidecar", "kernels/kvkernels", "benchmarks", "training")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if "_pb2" not in path.name and "data" not in path.parts
)
OPENINGS = re.compile(r"(What|Who|Whose|Whoever|Whether|Where|How|When|Of|Whatever)\b")
NO_ACTORS = re.compile(r"\b(somebody|nobody|whoever|so many)\b", re.I)


def banned() -> set[str]:
    """Words of the glossary's last columns."""
    words: set[str] = set()
    for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[2] not in ("not used", "---", ""):
            words |= {word.strip() for word in cells[2].split(",")}
    return words


BANNED = banned()


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def refused(name: str) -> set[str]:
    """Banned words that are whole parts of a name."""
    return {word for word in BANNED if f"_{word}_" in f"_{snake(name)}_"}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def definitions(path: Path) -> Iterator[tuple[str, str, int]]:
    """Name, first line of the docstring and line number of a module, its classes and its functions."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = path.stem if isinstance(node, ast.Module) else node.name
            text = ast.get_docstring(node) or ""
            yield name, text.split("\n\n")[0].replace("\n", " "), getattr(node, "lineno", 1)


def settings(path: Path) -> Iterator[str]:
    """Annotated fields of settings classes, which become flags and variables."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ClassDef) and any("Settings" in ast.unparse(base) for base in node.bases):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield field.target.id


def metric_names() -> set[str]:
    from deploy.grafana.exported import exported

    return set(exported())


def test_the_glossary_bans_words() -> None:
    assert {"doors", "guess", "carrying", "rooms"} <= BANNED
    assert refused("open_doors") == {"doors"}
    assert refused("RoomKeeper") == {"room"}
    assert not refused("bedroom")


def test_names_use_the_glossary() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name} ({', '.join(refused(name))})"
        for path in FILES
        for name, _, line in definitions(path)
        if refused(name)
    ]
    wrong += [f"{path}: setting {name}" for path in FILES for name in settings(path) if refused(name)]
    assert wrong == []


def test_metrics_use_the_glossary() -> None:
    assert {name for name in metric_names() if refused(name)} == set()


@pytest.mark.parametrize("folder", FOLDERS)
def test_first_lines_of_docstrings(folder: str) -> None:
    wrong = []
    for path in FILES:
        if not path.is_relative_to(ROOT / folder):
            continue
        for name, text, line in definitions(path):
            first = re.split(r"(?<=[.:;])\s", text)[0]
            words = set(re.findall(r"[a-z_]+", first.lower()))
            if OPENINGS.match(text) or NO_ACTORS.search(first) or words & BANNED:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name}: {first}")
    assert wrong == []
