"""Python environments of other engines, which ``make bench-peers`` creates."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from kvsidecar.process.cpus import OPENMP_WAIT_SETTINGS

ROOT = Path(__file__).parent.parent.parent
# For each engine: the module to import, and the folder of the environment that the Makefile creates.
_ENGINES = {
    "vllm": ("vllm", ".venv-vllm"),
    "llama_cpp": ("llama_cpp", ".venv-llama"),
    "openvino_genai": ("openvino_genai", ".venv-openvino"),
}
# Allocator and OpenMP runtime that vLLM's manual recommends to preload, with the file names in search order.
_PRELOADS = (("libtcmalloc_minimal.so*", "libtcmalloc.so*"), ("libiomp5.so",))


class EngineNotInstalled(RuntimeError):
    """An engine is not installed; the message says how to install it."""


@dataclass(frozen=True)
class Environment:
    """A Python interpreter that can import an engine, and the libraries to preload."""

    python: Path
    preloaded: tuple[Path, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)

    def variables(self) -> dict[str, str]:
        """Return environment variables: with this source tree and the preloaded libraries.

        Our settings and OpenMP's wait policy are left out: the policy of tests halves llama.cpp's decode speed.
        """
        out = {k: v for k, v in os.environ.items() if not k.startswith("KVSIDECAR_") and k not in OPENMP_WAIT_SETTINGS}
        ours = (ROOT, ROOT / "kernels", ROOT / "clients" / "python")
        out["PYTHONPATH"] = os.pathsep.join(map(str, ours))
        if self.preloaded:
            out["LD_PRELOAD"] = os.pathsep.join(map(str, self.preloaded))
        return out | self.settings


def find(engine: str) -> Environment:
    """Find the environment of ``vllm``, ``llama_cpp`` or ``openvino_genai``.

    This is the interpreter in the variable KVSIDECAR_BENCH_NAME, this interpreter, or the one that the Makefile has
    installed. Raises EngineNotInstalled.
    """
    module, folder = _ENGINES[engine]
    named = os.environ.get(f"KVSIDECAR_BENCH_{engine.upper()}", "")
    if named:
        if not has(Path(named), module):
            raise EngineNotInstalled(
                f"KVSIDECAR_BENCH_{engine.upper()} is {named}, which is no interpreter with {module}"
            )
        return Environment(Path(named))
    if importlib.util.find_spec(module) is not None:
        return Environment(Path(sys.executable))
    made = ROOT / folder / "bin" / "python"
    if not has(made, module):
        raise EngineNotInstalled(f"{engine} is not installed; make bench-peers makes {folder} with it")
    return Environment(made)


def has(python: Path, module: str) -> bool:
    """Return True if an interpreter can import a module."""
    looks = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", looks], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def preloads(python: Path) -> tuple[Path, ...]:
    """Return the paths of tcmalloc and Intel's OpenMP that exist in the environment or in Debian's folders."""
    places = [python.parent.parent / "lib", *sorted(python.parent.parent.glob("lib/python*/site-packages/vllm/libs"))]
    places += [*sorted(Path("/usr/lib").glob("*-linux-gnu")), Path("/usr/lib64")]
    found = []
    for patterns in _PRELOADS:
        hits = (hit for place in places for pattern in patterns for hit in sorted(place.glob(pattern)))
        first = next(hits, None)
        if first is not None:
            found.append(first)
    return tuple(found)
