"""Planted defects as data: each replaces one text in one file."""

from __future__ import annotations

import ast
import hashlib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
AREAS = (
    "store", "commits", "durable", "remote", "access", "engine", "reuse", "cache", "kernels", "gpu", "gpu_kernels",
    "gateway",
)  # fmt: skip


class StaleMutation(Exception):
    """A mutation does not fit the tree: its text is missing or not unique, or one of its tests is missing."""


@dataclass(frozen=True)
class Mutation:
    """A small defect in ``file``, and the tests that must notice it.

    ``old`` occurs exactly once in the file. ``tests`` are arguments of pytest; the most likely test comes first.
    ``equivalent`` says why no test can notice the mutation; such a mutation must survive.
    """

    area: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str
    equivalent: str = ""

    def mutated(self, root: Path) -> str:
        """Return the file's text with the defect. Raises StaleMutation."""
        path = root / self.file
        if not path.exists():
            raise StaleMutation(f"{self.name}: there is no file {self.file}")
        text = path.read_text()
        if (found := text.count(self.old)) != 1:
            raise StaleMutation(f"{self.name}: {self.file} has its old text {found} times, which must be once")
        if self.old == self.new:
            raise StaleMutation(f"{self.name}: its new text is its old text")
        for test in self.tests:
            if not (root / test.split("::")[0]).exists():
                raise StaleMutation(f"{self.name}: there is no test {test}")
        mutated = text.replace(self.old, self.new)
        if path.suffix == ".py":
            try:
                ast.parse(mutated)
            except SyntaxError as error:  # every test would notice that
                raise StaleMutation(f"{self.name}: {self.file} is no Python with its new text: {error}") from None
        return mutated

    def digest(self, root: Path) -> str:
        """Return a hash of the mutation, its file and its tests. While it is unchanged, an earlier result counts."""
        parts = [repr(self), (root / self.file).read_text()]
        for test in self.tests:
            path = root / test.split("::")[0]
            files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
            parts += [file.read_text() for file in files]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def declared(folder: Path = FOLDER) -> list[Mutation]:
    """Return all mutations in the folder's files ``AREA.toml``. Raises StaleMutation for an unusable one."""
    found: list[Mutation] = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text()).get("mutation", []):
            values = entry | {"tests": tuple(entry.get("tests", ())), "area": path.stem}
            try:
                found.append(Mutation(**values))
            except TypeError as error:
                raise StaleMutation(f"{path.name}: {entry.get('name', entry)}: {error}") from None
    names = [mutation.name for mutation in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise StaleMutation(f"these names are given twice: {', '.join(twice)}")
    if aimless := [mutation.name for mutation in found if not mutation.tests]:
        raise StaleMutation(f"these name no tests: {', '.join(aimless)}")
    return found


def chosen(mutations: Iterable[Mutation], words: Iterable[str]) -> list[Mutation]:
    """Return the mutations whose area, file or beginning of the name is one of the words; all without words."""
    words = tuple(words)
    return [m for m in mutations if not words or m.area in words or m.name.startswith(words) or m.file in words]
