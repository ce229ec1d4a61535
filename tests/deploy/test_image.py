"""Container file, built to the end with buildah, and the image's content.

No registry is needed: the bases are images of links only, in which the machine's own /usr is mounted while a command
runs, and packages come from a folder that pip's own configuration fills. Takes minutes.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.installation import declared

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / "deploy" / "container"
PYTHON = "/usr/bin/python3"
BASE, IMAGE = "localhost/base:test", "localhost/kvsidecar:test"
EXTRAS = "worker,encryption,otel"
MOUNTED = ("/usr", "/etc/ld.so.cache", "/etc/alternatives")
LINKS = ("bin", "lib", "lib64", "sbin")
FACTS = """import os, torch
from kvkernels.cpu.cpu_library import loaded_library
print(loaded_library().library is not None, os.getuid())"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


class Buildah:
    """buildah with its own storage in a folder."""

    def __init__(self, folder: Path) -> None:
        """Find working options. Raises RuntimeError, which lists the attempts, if no image can be built."""
        folder.mkdir()
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        settings = folder / "containers.conf"
        settings.write_text(f'[containers]\ndefault_ulimits = ["nofile={most}:{most}"]\n', encoding="utf-8")
        self._environment = {**os.environ, "CONTAINERS_CONF": str(settings), "BUILDAH_ISOLATION": "chroot"}
        storage = ("--root", str(folder / "storage"), "--runroot", str(folder / "run"), "--storage-driver", "vfs")
        self._command = ["buildah", *storage]
        self._make_base()

    def __call__(self, *arguments: str, seconds: float = 120) -> str:
        done = subprocess.run(
            [*self._command, *arguments], capture_output=True, text=True, timeout=seconds, check=False,
            env=self._environment, cwd=ROOT,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"buildah {arguments[0]}: {(done.stdout + done.stderr)[-3000:]}")
        return done.stdout.strip()

    def _make_base(self) -> None:
        container = self("from", "scratch")
        root = Path(self("mount", container))
        for name in LINKS:
            (root / name).symlink_to(f"usr/{name}")
        for name in ("etc", "run", "var/lib", "var/cache"):
            (root / name).mkdir(parents=True)
        root.chmod(0o755)
        (root / "usr").mkdir()
        (root / "tmp").mkdir(0o777)
        (root / "tmp").chmod(0o1777)
        self("umount", container)
        self("config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin", container)
        self("commit", "--rm", "--quiet", container, BASE)

    def inside(self, *command: str) -> str:
        """Run a command in the image as the image's user, who may write only to /tmp; return the output."""
        container = self("from", "--pull-never", IMAGE)
        try:
            mounts = [f"--volume={path}:{path}:ro" for path in MOUNTED]
            # A shell finds it: buildah would look before anything is mounted.
            return self("run", *mounts, container, "--", "/bin/sh", "-c", 'exec "$@"', "sh", *command)
        finally:
            self("rm", container)


def why_not() -> str:
    """Return the reason that no image can be built here; empty if one can."""
    if shutil.which("buildah") is None:
        return "buildah is not installed (Debian: buildah)"
    if os.geteuid() != 0:
        return "mounting what is built needs root"
    if subprocess.run([PYTHON, "-c", "import ensurepip"], capture_output=True, check=False).returncode:
        return f"{PYTHON} has no venv (Debian: python3-venv)"
    version = subprocess.run(
        [PYTHON, "-c", "import sys; print(*sys.version_info[:2])"], capture_output=True, text=True, check=True
    ).stdout.split()
    return "" if tuple(map(int, version)) == sys.version_info[:2] else f"{PYTHON} is another version than this one"


def index_of(wheels: Path) -> None:
    """Turn a folder of wheels into a package index.

    https://packaging.python.org/en/latest/specifications/simple-repository-api/
    """
    for wheel in list(wheels.glob("*.whl")):
        project = wheels / "simple" / re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()
        project.mkdir(parents=True, exist_ok=True)
        wheel.rename(project / wheel.name)
        links = "".join(f'<a href="{file.name}">{file.name}</a>\n' for file in sorted(project.glob("*.whl")))
        (project / "index.html").write_text(links, encoding="utf-8")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    if missing := why_not():
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("image")
    try:
        buildah = Buildah(folder / "buildah")
    except RuntimeError as error:
        pytest.skip(f"buildah does not work here: {error}")
    wheels = folder / "wheels"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    needed = {str(requirement) for extra in EXTRAS.split(",") for requirement in declared(extra)}
    wanted = [*sorted(needed), *project["build-system"]["requires"], "wheel"]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "-c", "constraints.txt", "--wheel-dir", str(wheels)]
    done = subprocess.run([*command, *wanted], cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"the packages cannot be had here: {done.stderr[-500:]}")
    index_of(wheels)
    index = "file:///index"
    arguments = {"BUILD_BASE": BASE, "RUN_BASE": BASE, "EXTRAS": EXTRAS, "TORCH_INDEX": index, "PIP_INDEX_URL": index}
    try:
        buildah(
            "build", "--pull-never", "--layers=false", "--format=oci",
            *(f"--build-arg={name}={value}" for name, value in arguments.items()),
            *(f"--volume={path}:{path}:ro" for path in MOUNTED), f"--volume={wheels}/simple:/index:ro",
            f"--file={CONTAINER / 'Containerfile'}", f"--ignorefile={CONTAINER / 'ignore'}", f"--tag={IMAGE}", ".",
            seconds=1200,
        )  # fmt: skip
        yield buildah
    finally:
        buildah("rmi", "--all", "--force")
        shutil.rmtree(folder, ignore_errors=True)


def test_the_image_has_the_program_and_its_kernels(image: Buildah) -> None:
    assert image.inside("kvsidecar", "--version").startswith("kvsidecar ")
    # The kernels are compiled in it, and it runs as nobody special.
    assert image.inside("/opt/kvsidecar/bin/python", "-c", FACTS) == "True 10001"


def test_the_image_has_neither_sources_nor_installers(image: Buildah) -> None:
    looked = "import os; print([p for p in ('/source', '/wheels', '/opt/kvsidecar/bin/pip') if os.path.exists(p)])"
    assert image.inside("/opt/kvsidecar/bin/python", "-c", looked) == "[]"
