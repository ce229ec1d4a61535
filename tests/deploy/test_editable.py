"""Editable install, as by ``make setup``, used from the folder that contains the clone.

Named ``kvsidecar``, the clone's folder looks like a package of that name to a process started there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.installation import build, copy_checkout, copy_libraries, environment_with, run, serves

pytestmark = pytest.mark.timeout(900)
PACKAGES = ("kvsidecar", "cache_daemon", "inference_svc", "kvkernels")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Environment with an editable install of the clone ``kvsidecar`` beside it."""
    folder = tmp_path_factory.mktemp("home")
    clone = folder / "kvsidecar"
    copy_checkout(clone)
    copy_libraries(clone)
    return environment_with(build("build_editable", clone, folder / "made", ".whl"), folder / "environment")


def test_the_packages_are_found_from_the_clones_parent(installed: Path) -> None:
    parent = installed.parent
    found = "import importlib, sys; print(*(importlib.import_module(n).__file__ for n in sys.argv[1:]))"
    said = run(str(installed / "bin" / "python"), "-c", found, *PACKAGES, folder=parent).split()
    clone = parent / "kvsidecar"
    assert said == [
        str(clone / "clients" / "python" / "kvsidecar" / "__init__.py"),
        str(clone / "cache_daemon" / "__init__.py"),
        str(clone / "inference_svc" / "__init__.py"),
        str(clone / "kernels" / "kvkernels" / "__init__.py"),
    ]
    run(str(installed / "bin" / "python"), "-c", "from kvsidecar import Client", folder=parent)


def test_no_process_of_a_node_imports_from_the_folder_that_it_is_started_in(installed: Path, tmp_path: Path) -> None:
    """The folder contains the clone, and modules that shadow common imports and end their importer."""
    (tmp_path / "kvsidecar").symlink_to(installed.parent / "kvsidecar")
    for name in ("structlog", "grpc", "inference_svc", "cache_daemon"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')\n")
    assert "<title>" in serves(installed, tmp_path, tmp_path / "run")
