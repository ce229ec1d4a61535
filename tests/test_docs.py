"""What the documents name is there: files, headings, tests, make's targets, modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("clients/**/README.md"), ROOT / "deploy/README.md"]
)
DOCUMENTS = [d for d in DOCUMENTS if "node_modules" not in d.parts]
_LINK = re.compile(r"\]\(([^)\s#]*)(?:#([\w-]+))?\)")
_PATH = re.compile(
    r"`((?:tests|benchmarks|cache_daemon|inference_svc|kernels|kvkernels|kvsidecar|training|deploy|protos)/[\w./-]+)"
)
_TEST = re.compile(r"`([\w/]+/test_\w+\.py)(?:::(\w+))?")
# Where paths that documents name begin.
_FROM = (ROOT, ROOT / "clients/python", ROOT / "kernels", ROOT / "tests")


def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def headings(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ +(.*)$", re.sub(r"```.*?```", "", text_of(document), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_what_a_document_names_is_there(document: Path) -> None:
    text = text_of(document)
    for name, anchor in _LINK.findall(text):
        if "://" in name:
            continue
        target = document.parent / name if name else document
        assert target.exists(), name
        assert not anchor or anchor in headings(target), f"{name}#{anchor}"
    for name in _PATH.findall(text):
        assert any((start / name).exists() for start in (*_FROM, document.parent)), name
    short_names = {"auth/": "cache_daemon/auth/"} if document.name == "security.md" else {}
    for name, test in _TEST.findall(text):
        for short, whole in short_names.items():
            name = whole + name.removeprefix(short) if name.startswith(short) else name
        found = [start / name for start in _FROM if (start / name).exists()]
        assert found, name
        assert f"def {test}(" in text_of(found[0]) or not test, f"{name}::{test}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_what_a_document_tells_to_run_is_there(document: Path) -> None:
    text, makefile = text_of(document), text_of(ROOT / "Makefile")
    if document.parent in (ROOT, ROOT / "docs"):
        for target in re.findall(r"`make ([a-z-]+)", text):
            assert re.search(rf"^{target}:", makefile, re.M), target
    for module in re.findall(
        r"python -m ((?:benchmarks|training|tests|cache_daemon|inference_svc|kvkernels)[\w.]*\w)", text
    ):
        path = module.replace(".", "/")
        places = [
            start / end for start in _FROM for end in (f"{path}.py", f"{path}/__main__.py", f"{path}/__init__.py")
        ]
        assert any(place.exists() for place in places), module


def _packages() -> list[str]:
    """The packages of the project, as the map names them: the last part of their paths."""
    roots = [
        ROOT / "cache_daemon",
        ROOT / "inference_svc",
        ROOT / "clients/python/kvsidecar",
        ROOT / "kernels/kvkernels",
    ]
    found = {path.parent for root in roots for path in root.rglob("__init__.py")} - {ROOT / "clients/python/kvsidecar"}
    return sorted({path.name for path in found if not re.fullmatch(r"v\d", path.name)})


def test_the_map_names_every_package() -> None:
    text = text_of(ROOT / "docs/architecture.md")
    missing = [name for name in _packages() if not re.search(rf"[`/.]{name}[/`]", text)]
    assert not missing, "docs/architecture.md has no word about these packages"


@pytest.mark.parametrize(
    "room", ["cache_daemon/store", "inference_svc/engine", "inference_svc/gateway", "inference_svc"]
)
def test_the_map_names_every_module_of_the_large_rooms(room: str) -> None:
    named = set(re.findall(r"(\w+\.py)`", text_of(ROOT / "docs/architecture.md")))
    modules = {path.name for path in (ROOT / room).glob("*.py") if not path.name.startswith("__")}
    assert modules <= named, f"docs/architecture.md has no word about these modules of {room}"
