"""Build of the CPU kernels: one shared library per instruction set (``python -m kvkernels.cpu``).

``pip install`` runs it with the machine's compiler, or with the ``ziglang`` wheel if there is none. Imports only the
standard library, so that it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
LIBRARIES = _PACKAGE / "lib" / "cpu"
# Name of the file with the fingerprint of the sources, in the folder of the libraries.
STAMP = "fingerprint"
KERNELS = (
    "attention.cpp",
    "cpu_graph.cpp",
    "kv_pack.cpp",
    "code_recovery.cpp",
    "f32_gemm.cpp",
    "paged_copy.cpp",
    "bf16_gemv.cpp",
    "quantized_gemm.cpp",
    "norm_rope_silu.cpp",
    "head_rows.cpp",
)
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",  # fused operations are explicit, so that bits do not depend on the compiler
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_VNNI = (*_AVX512, "-mavx512vnni")
# Variants by architecture, the best last; kvk_features() sets bit i if the CPU can run variant i.
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2": _AVX2,
        "avx512": _AVX512,
        "avx512vnni": _VNNI,
        "avx512bf16": (*_VNNI, "-mavx512bf16"),
    },
    "aarch64": {"neon": (), "neondot": ("-march=armv8.2-a+dotprod",)},
}
_SAME = {"amd64": "x86_64", "arm64": "aarch64"}


def architecture() -> str:
    """Return this machine's architecture by its compiler name."""
    machine = platform.machine().lower()
    return _SAME.get(machine, machine)


def variants() -> dict[str, tuple[str, ...]]:
    """Return names and compiler flags of this architecture's variants, the best last."""
    return VARIANTS.get(architecture(), {})


def sources() -> Path:
    """Return the source directory. Raises FileNotFoundError.

    It is in the repository or in the installed package.
    """
    for folder in (_PACKAGE.parent / "cpu", _PACKAGE / "sources" / "cpu"):
        if (folder / KERNELS[0]).exists():
            return folder
    raise FileNotFoundError(f"no sources of CPU kernels beside {_PACKAGE} or in it; install kvsidecar from a wheel")


def fingerprint(folder: Path) -> str:
    """Hash the sources and compiler flags; a change requires a rebuild."""
    digest = hashlib.sha256(repr((architecture(), _FLAGS, VARIANTS)).encode())
    for path in sorted(folder.glob("*.*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> list[str] | None:
    """Return a C++ compiler's command.

    Returns the compiler named by CXX or CC if one of them is set, otherwise the machine's compiler, otherwise
    ziglang's.
    """
    if named := os.environ.get("CXX") or os.environ.get("CC"):
        command = shlex.split(named)
        return command if shutil.which(command[0]) and Path(command[0]).name != "false" else None
    for name in ("g++", "clang++", "c++"):
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang") is not None:
        return [
            sys.executable,
            "-m",
            "ziglang",
            "c++",
            "-nostdlib++",
            "-mcpu=baseline",
        ]  # portable code, not code for this machine only
    return None


def needs_ziglang() -> bool:
    """Return True if the build needs the ziglang wheel.

    The build needs it if the machine has no compiler and neither CXX nor CC is set.
    """
    return bool(variants()) and not os.environ.get("CXX") and not os.environ.get("CC") and compiler() is None


def compile_library(command: list[str], target: Path, names: tuple[str, ...], flags: tuple[str, ...]) -> None:
    """Compile sources to one shared library. Raises RuntimeError with the compiler's message."""
    paths = [str(sources() / name) for name in names]
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".part", delete=False) as unfinished:
        done = subprocess.run(
            [*command, *_FLAGS, *flags, *paths, "-o", unfinished.name], capture_output=True, text=True
        )
    if done.returncode:
        Path(unfinished.name).unlink()
        raise RuntimeError(f"{shlex.join(command)} does not compile the CPU kernels:\n{done.stderr[-4000:]}")
    Path(unfinished.name).chmod(0o755)
    Path(unfinished.name).replace(target)  # atomic, even if another process builds


def build(folder: Path = LIBRARIES) -> list[str]:
    """Compile this architecture's variants unless they are current.

    Returns the names of the compiled variants. Raises RuntimeError if there is no compiler, or if no variant compiles.
    """
    stamp, now = folder / STAMP, fingerprint(sources())
    if stamp.exists() and stamp.read_text() == now:
        return compiled(folder)
    command = compiler()
    if command is None:
        raise RuntimeError("no C++ compiler: install g++ or clang++, or `pip install ziglang`")
    if not variants():
        raise RuntimeError(f"there are no CPU kernels for {architecture()}")
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    jobs = [("features", ("cpu_features.cpp",), ()), *((name, KERNELS, flags) for name, flags in variants().items())]

    def attempt(job: tuple[str, tuple[str, ...], tuple[str, ...]]) -> RuntimeError | None:
        target = folder / f"{job[0]}.so"
        target.unlink(missing_ok=True)
        try:
            compile_library(command, target, job[1], job[2])
        except RuntimeError as error:  # an older compiler may not support the newest instructions
            return error
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        features, *failed = pool.map(attempt, jobs)
    if features is not None:
        raise features
    if not compiled(folder):
        raise next(error for error in failed if error is not None)
    stamp.write_text(now)
    return compiled(folder)


def compiled(folder: Path = LIBRARIES) -> list[str]:
    """Return this architecture's compiled variants, the best last."""
    return [name for name in variants() if (folder / f"{name}.so").exists()]


def main() -> int:
    parser = argparse.ArgumentParser(prog="kvkernels.cpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=LIBRARIES)
    options = parser.parse_args()
    try:
        names = build(options.out)
    except (RuntimeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{options.out}: {', '.join(names)}")
    return 0
