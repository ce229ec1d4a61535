"""Copies of this checkout, wheels that are built from the copies, and environments with such a wheel."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import httpx
import pytest
from kvkernels.cpu.cpu_build import LIBRARIES
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.node import free_port
from tests.deploy.playing import wait_for

ROOT = Path(__file__).parents[2]
# Hooks that pip calls (https://peps.python.org/pep-0517/ and pep-0660).
_BACKEND = "import sys; sys.path.insert(0, 'kernels'); import build_backend as b; b.{}(sys.argv[1])"
_START_SECONDS = 300


def without_paths() -> dict[str, str]:
    """Return the environment's variables without those that locate packages."""
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}


def run(*command: str, folder: Path) -> str:
    """Run a command without this process's paths; return its output."""
    done = subprocess.run(
        command, cwd=folder, env=without_paths(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def copy_checkout(checkout: Path) -> None:
    """Copy all files that git does not ignore.

    Skips the test outside a checkout, or if setuptools is too old.
    """
    # The version comes from the metadata: importing setuptools would replace distutils in this process.
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("this environment's setuptools is older than 77")
    files = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    listed = run(*files, folder=ROOT).split("\n") if (ROOT / ".git").exists() else []
    if not listed:
        pytest.skip("this is no git checkout")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)


def copy_libraries(source: Path) -> None:
    """Copy this checkout's CPU kernels, so that a build with unchanged sources need not compile them."""
    if LIBRARIES.is_dir():
        shutil.copytree(LIBRARIES, source / LIBRARIES.relative_to(ROOT))


def build(hook: str, source: Path, made: Path, suffix: str) -> Path:
    """Run a hook of the build backend; return the artefact that it creates in the folder ``made``."""
    run(sys.executable, "-c", _BACKEND.format(hook), str(made), folder=source)
    (found,) = made.glob(f"*{suffix}")
    return found


def environment_with(wheel: Path, environment: Path) -> Path:
    """Create an environment with the wheel, and with all packages of this environment except ours."""
    packages = _environment(wheel, environment)
    # A .pth file adds the folder with the other packages. It does not contain ours, because ours is an editable
    # install.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return environment


def environment_of(wheel: Path, environment: Path, extra: str = "") -> Path:
    """Create an environment with the packages that ``pip install kvsidecar[extra]`` would install.

    The environment has links to the files of these packages in this environment, so nothing is downloaded.
    """
    packages = _environment(wheel, environment)
    for name in closure(declared(extra)):
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or []:
            target = packages / file
            if ".." not in file.parts and not target.exists() and Path(distribution.locate_file(file)).is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(distribution.locate_file(file))
    return environment


def declared(extra: str = "") -> list[Requirement]:
    """Return the requirements in pyproject.toml of the base installation and of an extra, nested extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(text) for text in project["dependencies"]]
    extras = [extra] if extra else []
    for name in extras:
        for requirement in map(Requirement, project["optional-dependencies"][name]):
            if requirement.name == project["name"]:
                extras += sorted(requirement.extras)
            else:
                found.append(requirement)
    return found


def closure(requirements: list[Requirement]) -> set[str]:
    """Return the names of all distributions that requirements need, from the metadata of the installed ones."""
    found: set[str] = set()
    wanted = [(requirement, "") for requirement in requirements]
    for requirement, extra in wanted:
        name = canonicalize_name(requirement.name)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            new = [""] * (name not in found) + sorted(requirement.extras)
            found.add(name)
            needed = [Requirement(text) for text in importlib.metadata.requires(name) or [] if new]
            wanted += [(r, e) for r in needed for e in new]
    return found


def _environment(wheel: Path, environment: Path) -> Path:
    """Create an environment with only the wheel; return its folder of packages."""
    folder = environment.parent
    run(sys.executable, "-m", "venv", "--without-pip", str(environment), folder=folder)
    python = str(environment / "bin" / "python")
    install = ("--python", python, "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    run(sys.executable, "-m", "pip", *install, folder=folder)
    return Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", folder=folder).strip())


def serves(environment: Path, folder: Path, runtime_dir: Path) -> str:
    """Start a node from the environment, query it, and stop it; return the page that the node served."""
    kvsidecar, port = str(environment / "bin" / "kvsidecar"), free_port()
    flags = ("--port", str(port), "--runtime-dir", str(runtime_dir), "--store", "none")
    node = subprocess.Popen([kvsidecar, "serve", "demo", *flags], cwd=folder, env=without_paths())
    try:

        def answer() -> str:
            assert node.poll() is None
            try:
                body = {"prompt": "one two three", "max_tokens": 3}
                found = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30)
                return found.text if found.status_code == 200 else ""
            except httpx.HTTPError:
                return ""

        assert '"completion_tokens"' in wait_for(answer, _START_SECONDS)
        page = httpx.get(f"http://127.0.0.1:{port}/", timeout=60).text
        run(kvsidecar, "stop", "--runtime-dir", str(runtime_dir), folder=folder)
        assert node.wait(90) == 0
        return page
    finally:
        node.kill()
        node.wait()
