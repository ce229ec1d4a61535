"""``make dist``: the wheel is built from the source distribution alone, and runs without a checkout."""

from __future__ import annotations

import email
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from kvkernels.cpu.cpu_build import LIBRARIES

from tests.deploy.installation import build, copy_checkout, copy_libraries, environment_with, run, serves

pytestmark = pytest.mark.timeout(900)
FACTS = """
import importlib, pathlib, sys
for name in ("kvsidecar", "cache_daemon", "inference_svc", "kvkernels"):
    path = pathlib.Path(importlib.import_module(name).__file__)
    assert path.is_relative_to(sys.prefix), path
from kvkernels.cpu.cpu_library import loaded_library
print(loaded_library().library is not None)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel built from the source distribution, without a checkout."""
    folder = tmp_path_factory.mktemp("dist")
    checkout, unpacked, made = folder / "checkout", folder / "unpacked", folder / "made"
    # What is built leaves traces, which are not to be left here.
    copy_checkout(checkout)
    with tarfile.open(build("build_sdist", checkout, made, ".tar.gz")) as tar:
        tar.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    assert {"LICENSE", "NOTICE", "PKG-INFO", "protos"} <= {path.name for path in source.iterdir()}
    copy_libraries(source)
    found = build("build_wheel", source, made, ".whl")
    shutil.rmtree(checkout)
    shutil.rmtree(unpacked)
    return found


@pytest.fixture(scope="module")
def empty(wheel: Path) -> Path:
    """Environment with the wheel and all installed packages, without a checkout."""
    return environment_with(wheel, wheel.parent.parent / "environment")


def test_all_is_in_the_wheel(empty: Path) -> None:
    assert run(str(empty / "bin" / "kvsidecar"), "--version", folder=empty).startswith("kvsidecar 0.")
    said = run(str(empty / "bin" / "python"), "-c", FACTS, folder=empty)
    assert said.strip() == str(LIBRARIES.is_dir())


def test_a_node_runs_from_the_wheel(empty: Path, tmp_path: Path) -> None:
    assert "<title>" in serves(empty, tmp_path, tmp_path / "run"), "the page is in the wheel"


def test_auditwheel_finds_libraries_where_it_accepts_them(wheel: Path) -> None:
    """``make dist`` sets the wheel's manylinux tag, which auditwheel refuses for pure Python wheels."""
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        (about,) = (email.message_from_bytes(file.read(n)) for n in names if n.endswith(".dist-info/WHEEL"))
    libraries = [name for name in names if name.endswith(".so")]
    assert bool(libraries) == LIBRARIES.is_dir()
    assert about["Root-Is-Purelib"] == str(not libraries).lower()
    assert not any(".data/" in name for name in names)
    assert about["Tag"].startswith("py3-none-")


def test_the_metadata_says_what_an_index_shows(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        (metadata,) = (email.message_from_bytes(file.read(n)) for n in names if n.endswith(".dist-info/METADATA"))
    for field in ("Author", "Summary", "Keywords", "Classifier", "Requires-Python"):
        assert metadata[field], field
    assert metadata["License-Expression"] == "MIT"
    assert set(metadata.get_all("License-File", [])) == {"LICENSE", "NOTICE"}
    assert {"worker", "gateway", "vllm", "sglang", "lmcache"} <= set(metadata.get_all("Provides-Extra", []))
    assert {f"{package}/py.typed" for package in ("kvsidecar", "cache_daemon", "inference_svc", "kvkernels")} <= set(
        names
    )
