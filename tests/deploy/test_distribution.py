"""What ``make dist`` makes: the wheel comes of the source distribution alone, and runs where no checkout is."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
from kvkernels.cpu.cpu_build import LIBRARIES

from tests.deploy.installation import build, copy_checkout, copy_libraries, environment_with, run, serves

FACTS = """
import importlib, pathlib, sys
for name in ("kvsidecar", "cache_daemon", "inference_svc", "kvkernels"):
    path = pathlib.Path(importlib.import_module(name).__file__)
    assert path.is_relative_to(sys.prefix), path
from kvkernels.cpu.library import found
print(found().library is not None)
"""


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and no checkout."""
    folder = tmp_path_factory.mktemp("dist")
    checkout, unpacked, made = folder / "checkout", folder / "unpacked", folder / "made"
    # What is built leaves traces, which are not to be left here.
    copy_checkout(checkout)
    with tarfile.open(build("build_sdist", checkout, made, ".tar.gz")) as tar:
        tar.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    copy_libraries(source)
    wheel = build("build_wheel", source, made, ".whl")
    shutil.rmtree(checkout)
    shutil.rmtree(unpacked)
    return environment_with(wheel, folder / "environment")


def test_all_is_in_the_wheel(empty: Path) -> None:
    assert run(str(empty / "bin" / "kvsidecar"), "--version", folder=empty).startswith("kvsidecar 0.")
    said = run(str(empty / "bin" / "python"), "-c", FACTS, folder=empty)
    assert said.strip() == str(LIBRARIES.is_dir())


def test_a_node_runs_from_the_wheel(empty: Path, tmp_path: Path) -> None:
    assert "<title>" in serves(empty, tmp_path, tmp_path / "run"), "the page is in the wheel"
