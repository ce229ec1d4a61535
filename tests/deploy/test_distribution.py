"""What ``make dist`` makes: the wheel comes of the source distribution alone, and runs where no checkout is."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import httpx
import pytest
from kvkernels.cpu.build import LIBRARIES

from benchmarks.node import free_port
from tests.deploy.playing import wait_for

ROOT = Path(__file__).parents[2]
# As pip calls them: https://peps.python.org/pep-0517/
BACKEND = "import sys; sys.path.insert(0, 'kernels'); import build_backend as b; b.{}(sys.argv[1])"
START_SECONDS = 90
FACTS = """
import importlib, pathlib, sys
for name in ("kvsidecar", "cache_daemon", "inference_svc", "kvkernels"):
    path = pathlib.Path(importlib.import_module(name).__file__)
    assert path.is_relative_to(sys.prefix), path
from kvkernels.cpu.library import found
print(found().library is not None)
"""


def run(*command: str, folder: Path) -> str:
    """Its output. Nothing of this process's paths is known to it."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, in which of this one's packages only the others are."""
    # Not by importing it: it would take distutils' place in this process.
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("this environment's setuptools is older than 77")
    folder = tmp_path_factory.mktemp("dist")
    checkout, unpacked, made = folder / "checkout", folder / "unpacked", folder / "made"
    # What is built leaves traces, which are not to be left here.
    listed = run("git", "ls-files", folder=ROOT).split("\n") if (ROOT / ".git").exists() else []
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
    if not listed:
        pytest.skip("this is no git checkout")
    run(sys.executable, "-c", BACKEND.format("build_sdist"), str(made), folder=checkout)
    (archive,) = made.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    if LIBRARIES.is_dir():  # compiled from the same sources: they are not compiled again
        shutil.copytree(LIBRARIES, source / LIBRARIES.relative_to(ROOT))
    run(sys.executable, "-c", BACKEND.format("build_wheel"), str(made), folder=source)
    (wheel,) = made.glob("*.whl")
    shutil.rmtree(checkout)
    shutil.rmtree(unpacked)
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", str(environment), folder=folder)
    python = str(environment / "bin" / "python")
    install = ("--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    run(sys.executable, "-m", "pip", *install, folder=folder)
    # The others, as a line of a path file adds them: an editable install of ours is none of them.
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip())
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return environment


def test_all_is_in_the_wheel(empty: Path) -> None:
    assert run(str(empty / "bin" / "kvsidecar"), "--version", folder=empty).startswith("kvsidecar 0.")
    said = run(str(empty / "bin" / "python"), "-c", FACTS, folder=empty)
    assert said.strip() == str(LIBRARIES.is_dir())


def test_a_node_runs_from_the_wheel(empty: Path, tmp_path: Path) -> None:
    kvsidecar, port = str(empty / "bin" / "kvsidecar"), free_port()
    flags = ("--port", str(port), "--runtime-dir", str(tmp_path / "run"), "--store", "none")
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    node = subprocess.Popen([kvsidecar, "serve", "demo", *flags], cwd=tmp_path, env=environment)
    try:

        def answer() -> str:
            assert node.poll() is None
            try:
                body = {"prompt": "one two three", "max_tokens": 3}
                found = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30)
                return found.text if found.status_code == 200 else ""
            except httpx.HTTPError:
                return ""

        assert '"completion_tokens"' in wait_for(answer, START_SECONDS)
        assert "<title>" in httpx.get(f"http://127.0.0.1:{port}/", timeout=10).text, "the page is in the wheel"
        run(kvsidecar, "stop", "--runtime-dir", str(tmp_path / "run"), folder=tmp_path)
        assert node.wait(30) == 0
    finally:
        node.kill()
        node.wait()
