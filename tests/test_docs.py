"""Names in the documents exist: files, headings, tests, make's targets, modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kvsidecar.cli.root_command import app
from typer.main import get_command

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob(".github/**/*.md"),
        *ROOT.glob("clients/**/README.md"),
        ROOT / "deploy/README.md",
    ]
)
DOCUMENTS = [d for d in DOCUMENTS if "node_modules" not in d.parts]
_LINK = re.compile(r"\]\(([^)\s#]*)(?:#([\w-]+))?\)")
_PATH = re.compile(
    r"`((?:tests|benchmarks|cache_daemon|inference_svc|kernels|kvkernels|kvsidecar|training|deploy|protos)/[\w./-]+)"
)
_TEST = re.compile(r"`([\w/]+/test_\w+\.py)(?:::(\w+))?")
_MODULE = re.compile(r"`([\w./-]+\.(?:py|cpp|cu|h))`")
_FUNCTION = re.compile(r"`([\w/]+\.py):(\w+)`")
# Where paths that documents name begin.
_FROM = (ROOT, ROOT / "clients/python", ROOT / "kernels", ROOT / "tests")
PACKAGES = [
    ROOT / "cache_daemon",
    ROOT / "inference_svc",
    ROOT / "clients/python/kvsidecar",
    ROOT / "kernels/kvkernels",
]
_FILES = [
    f"/{path.relative_to(ROOT)}"
    for folder in ("benchmarks", "cache_daemon", "clients", "deploy", "inference_svc", "kernels", "tests", "training")
    for path in (ROOT / folder).rglob("*.*")
]


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
    auth = {"auth/": "cache_daemon/auth/"} if document.name == "security.md" else {}
    for name, test in _TEST.findall(text):
        for short, whole in auth.items():
            name = whole + name.removeprefix(short) if name.startswith(short) else name
        found = [start / name for start in _FROM if (start / name).exists()]
        assert found, name
        assert f"def {test}(" in text_of(found[0]) or not test, f"{name}::{test}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_modules_that_a_document_names_are_there(document: Path) -> None:
    """``engine/engine_core.py`` is a file whose path ends so."""
    for name in _MODULE.findall(text_of(document)):
        assert any(path.endswith(f"/{name}") for path in _FILES), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_functions_that_a_document_names_are_there(document: Path) -> None:
    """``engine/engine_core.py:step`` is a function of a file whose path ends so."""
    for name, function in _FUNCTION.findall(text_of(document)):
        found = [path for start in PACKAGES for path in start.rglob(Path(name).name) if str(path).endswith(f"/{name}")]
        assert found, name
        assert any(f"def {function}(" in text_of(path) for path in found), f"{name}:{function}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_what_a_document_tells_to_run_is_there(document: Path) -> None:
    text, makefile = text_of(document), text_of(ROOT / "Makefile")
    if document.parent == ROOT or document.is_relative_to(ROOT / "docs"):
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


def test_the_tests_of_the_gpu_reviews_defects_are_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", text_of(ROOT / "docs/gpu.md")))
    there = {name for path in ROOT.glob("tests/**/test_*.py") for name in re.findall(r"def (test_\w+)", text_of(path))}
    assert len(named) > 20
    assert not named - there


def test_commands_of_the_readme_are_there() -> None:
    text, makefile = text_of(ROOT / "README.md"), text_of(ROOT / "Makefile")
    commands = "\n".join(_commands(text))
    assert len(text.splitlines()) <= 120
    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"kvsidecar ([a-z]+)", commands)) - known == set()
    for target in re.findall(r"^make ([a-z-]+)", commands, re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target
    for folder in re.findall(r"kubectl apply -k (\S+)", commands):
        assert (ROOT / folder / "kustomization.yaml").exists(), folder


def _commands(text: str) -> list[str]:
    """The lines of indented blocks, and what stands between backticks."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    return [*re.findall(r"^    (.*)$", text, re.M), *re.findall(r"`([^`\n]+)`", text)]


def _packages() -> list[str]:
    """The packages of the project, as the map names them: the last part of their paths."""
    found = {path.parent for root in PACKAGES for path in root.rglob("__init__.py")}
    found -= {ROOT / "clients/python/kvsidecar"}
    return sorted({path.name for path in found if not re.fullmatch(r"v\d", path.name)})


def test_the_map_names_every_package() -> None:
    text = text_of(ROOT / "docs/architecture.md")
    missing = [name for name in _packages() if not re.search(rf"[`/.]{name}[/`]", text)]
    assert not missing, "docs/architecture.md has no word about these packages"


@pytest.mark.parametrize(
    "package", ["cache_daemon/store", "inference_svc/engine", "inference_svc/gateway", "inference_svc"]
)
def test_the_map_names_every_module_of_the_large_packages(package: str) -> None:
    named = set(re.findall(r"(\w+\.py)`", text_of(ROOT / "docs/architecture.md")))
    modules = {path.name for path in (ROOT / package).glob("*.py") if not path.name.startswith("__")}
    assert modules <= named, f"docs/architecture.md has no word about these modules of {package}"


def test_records_have_numbers_of_their_own_and_are_listed() -> None:
    folder = ROOT / "docs" / "adr"
    records, listed = sorted(folder.glob("[0-9]*.md")), text_of(folder / "README.md")
    numbers = [record.name[:3] for record in records]
    assert len(set(numbers)) == len(numbers), numbers
    for record, number in zip(records, numbers, strict=True):
        assert f"]({record.name})" in listed
        assert text_of(record).startswith(f"# {number}. ")
