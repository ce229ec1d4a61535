"""Wheels for a machine with a GPU that has no network and no pip.

``make gpu-wheels`` collects the wheels on another machine. ``make gpu`` unpacks the wheels of modules that the machine
with the GPU lacks. This machine must have torch and transformers with their dependencies.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FOLDER = Path("build/gpu-wheels")
MAX_BYTES = 64 << 20
# Modules that the machine must have. They are too large for the collection, or most other modules need them.
GIVEN = ("torch", "numpy", "transformers")
# Modules that worker, daemon, benchmarks and tests import. The value names the distributions that contain a module and
# its dependencies.
OFFLINE = {
    "cuda.bindings.driver": ("cuda-bindings", "cuda-pathfinder"),
    "dotenv": ("python-dotenv",),
    "fastapi": ("fastapi", "annotated-doc"),
    "gguf": ("gguf",),
    "google.protobuf": ("protobuf",),
    "google.rpc": ("googleapis-common-protos",),
    "grpc": ("grpcio",),
    "grpc_health": ("grpcio-health-checking",),
    "grpc_reflection": ("grpcio-reflection",),
    "h11": ("h11",),
    "httpx": ("httpx", "httpcore", "anyio", "certifi", "idna"),
    "llguidance": ("llguidance",),
    "lmdb": ("lmdb",),
    "prometheus_client": ("prometheus-client",),
    "psutil": ("psutil",),
    "pydantic": ("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    "pydantic_settings": ("pydantic-settings",),
    "pytest": ("pytest", "iniconfig", "pluggy", "packaging"),
    "regex": ("regex",),
    "rich": ("rich", "pygments", "markdown-it-py", "mdurl"),
    "safetensors": ("safetensors",),
    "sortedcontainers": ("sortedcontainers",),
    "starlette": ("starlette",),
    "structlog": ("structlog",),
    "uvicorn": ("uvicorn", "click"),
    "uvloop": ("uvloop",),
    "xxhash": ("xxhash",),
    "zstandard": ("zstandard",),
}


def missing(names: tuple[str, ...] = GIVEN + tuple(OFFLINE)) -> list[str]:
    """Return the names of the modules that this interpreter does not find."""
    return [name for name in names if not _is_found(name)]


def _is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def unpack(folder: Path) -> Path:
    """Unpack the wheels of missing modules; return the folder from which Python can import them.

    If a wheel needs a newer version of a distribution than the machine has, the wheel of that distribution is unpacked
    too.
    """
    target = folder / f"unpacked-{sys.version_info.major}.{sys.version_info.minor}"
    wheels = {_normal(wheel.name.split("-")[0]): wheel for wheel in sorted(folder.glob("*.whl")) if _fits(wheel)}
    wanted = [_normal(d) for module in missing(tuple(OFFLINE)) for d in OFFLINE[module]]
    for name in wanted:  # grows
        if (wheel := wheels.get(name)) is not None:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
                wanted += [needed for needed in _outdated(archive) if needed not in wanted]
    return target


def _outdated(wheel: zipfile.ZipFile) -> list[str]:
    """Return the distributions that a wheel needs in another version than the installed one."""
    found = []
    metadata = [wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    for line in "\n".join(metadata).splitlines():
        if line.startswith("Requires-Dist:"):
            from packaging.requirements import Requirement  # transformers brings it

            needed = Requirement(line.removeprefix("Requires-Dist:"))
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            with contextlib.suppress(PackageNotFoundError):  # its wheel is unpacked if the module is missing
                if not needed.specifier.contains(version(needed.name), prereleases=True):
                    found.append(_normal(needed.name))
    return found


def _fits(wheel: Path) -> bool:
    """Return True if a wheel's tags fit this interpreter: pure Python, the stable ABI, or this Python version."""
    python, abi = wheel.stem.split("-")[-3:-1]
    return abi in ("none", "abi3") or python == f"cp{sys.version_info.major}{sys.version_info.minor}"


def _normal(name: str) -> str:
    return name.replace("-", "_").replace(".", "_").lower()


def collect(folder: Path, python: str) -> int:
    """Download the wheels for a Python version on Linux x86-64; return their size in bytes.

    Raises RuntimeError with pip's message if the download fails, and if the wheels are too large.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    names = {_normal(name) for distributions in OFFLINE.values() for name in distributions}
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12)]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux2010_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += [
        "--only-binary=:all:",
        f"--python-version={python}",
        *platforms,
        "--dest",
        str(folder),
        *_requirements(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PIP_CONSTRAINT": ""})
    if done.returncode:
        raise RuntimeError(f"pip download failed: {done.stderr[-2000:]}")
    for wheel in folder.glob("*.whl"):  # pip brings all dependencies, so that versions fit; the machine has the others
        if _normal(wheel.name.split("-")[0]) not in names:
            wheel.unlink()
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    if size > MAX_BYTES:
        raise RuntimeError(f"the wheels have {size >> 20} MiB; at most {MAX_BYTES >> 20} MiB can be carried")
    return size


def _requirements() -> list[str]:
    """Return the requirements for pip, with the version bounds of pyproject.toml."""
    with Path("pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    several = [project["dependencies"], *project["optional-dependencies"].values()]
    bounds = {_normal(re.split(r"[^\w.-]", one)[0]): one for listed in several for one in listed if "[" not in one}
    names = sorted({name for distributions in OFFLINE.values() for name in distributions})
    return [bounds.get(_normal(name), name).split(";")[0].strip() for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(prog="make gpu-wheels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--python", default="3.12", help="Python version of the machine with the GPU")
    options = parser.parse_args()
    size = collect(options.out, options.python)
    print(
        f"{options.out}: {len(list(options.out.glob('*.whl')))} wheels for Python {options.python}, {size / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
