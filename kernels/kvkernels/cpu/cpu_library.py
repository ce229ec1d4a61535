"""Loader of the compiled CPU kernels: the best variant for this CPU.

A job is a parameter structure that C++ and Python both define; its first field counts the work items that threads have
claimed.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvkernels.cpu import cpu_build
from kvkernels.cpu.thread_pool import run_on_openmp_team, run_on_own_threads


class KernelLibrary:
    """Shared library of one variant. Raises OSError when it does not load."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.c = ctypes.CDLL(str(cpu_build.LIBRARIES / f"{name}.so"))

    def kernel(self, name: str, job: type[ctypes.Structure]) -> Kernel:
        """Return the kernel ``kvk_{name}``. Raises RuntimeError when its job has another size."""
        size = self.number(f"{name}_bytes")
        if size != ctypes.sizeof(job):
            raise RuntimeError(f"{self.name}'s {name} takes {size} bytes, not {ctypes.sizeof(job)}: build it anew")
        return Kernel(self.c, f"kvk_{name}")

    def number(self, name: str, *arguments: int) -> int:
        """Call the function ``kvk_{name}``, which takes and returns integers."""
        function = getattr(self.c, f"kvk_{name}")
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * len(arguments)
        return int(function(*arguments))

    def function(self, name: str, *arguments: Any) -> Any:
        """Return the function ``kvk_{name}`` with these argument types and no result."""
        function = getattr(self.c, f"kvk_{name}")
        function.restype, function.argtypes = None, arguments
        return function


class Kernel:
    """Kernel function that takes a job. Calls release the GIL."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library = library  # keeps the code mapped
        self._call: Any = getattr(library, name)
        self._call.argtypes, self._call.restype = [ctypes.c_void_p], None
        self.address = ctypes.cast(self._call, ctypes.c_void_p)

    def run_on_own_threads(self, job: ctypes.Structure, threads: int) -> None:
        """Run the job on the calling thread and ``threads - 1`` threads of our own pool."""
        run_on_own_threads(self._call, ctypes.addressof(job), threads)

    def run_on_openmp_team(self, job: ctypes.Structure, threads: int) -> None:
        """Run the job on ``threads`` threads of torch's OpenMP team, the calling thread included."""
        if threads == 1:
            self._call(ctypes.addressof(job))
        else:
            run_on_openmp_team(self.address, self._call, ctypes.addressof(job), threads)


@dataclass(frozen=True)
class KernelCall:
    """Kernel with its job.

    The job's first ``counters`` fields must be zero before a run. ``held`` keeps the memory alive to which the job
    points.
    """

    kernel: Kernel
    job: ctypes.Structure
    held: tuple[Any, ...]
    counters: int = 1

    def run(self, threads: int) -> None:
        """Run the job once on the OpenMP team; see ``Kernel.run_on_openmp_team``."""
        self.kernel.run_on_openmp_team(self.job, threads)


@dataclass(frozen=True)
class LoadedLibrary:
    """Library of the best variant, or the reason why there is none, with a remedy."""

    library: KernelLibrary | None
    why: str
    advice: str = ""


@cache
def loaded_kernel(name: str, job: type[ctypes.Structure]) -> Kernel:
    """Return the kernel ``kvk_{name}`` of the best variant. Raises RuntimeError without kernels."""
    library = loaded_library().library
    if library is None:
        raise RuntimeError(loaded_library().why)
    return library.kernel(name, job)


@cache
def loaded_library() -> LoadedLibrary:
    """Load the best variant for this machine, once."""
    names, again = cpu_build.variants(), "python -m kvkernels.cpu"
    stamp = cpu_build.LIBRARIES / cpu_build.STAMP
    if not names:
        return LoadedLibrary(None, f"there are no CPU kernels for {cpu_build.architecture()}")
    if not stamp.exists():
        advice = f"install g++, or pip install ziglang; then {again}"
        return LoadedLibrary(None, "the CPU kernels were not compiled when kvsidecar was installed", advice)
    try:
        if stamp.read_text() != cpu_build.fingerprint(cpu_build.sources()):
            return LoadedLibrary(None, "the CPU kernels are older than their sources", again)
        runs = usable_variants()
        if not runs:
            return LoadedLibrary(None, f"this CPU has none of {', '.join(names)}")
        return LoadedLibrary(KernelLibrary(runs[-1]), f"C++, {runs[-1]}")
    except OSError as error:
        return LoadedLibrary(None, f"the CPU kernels do not load: {error}", again)


def load_kernel(name: str, job: type[ctypes.Structure]) -> Kernel | None:
    """Return the kernel ``kvk_{name}`` of the loaded variant; None without one."""
    library = loaded_library().library
    return None if library is None else library.kernel(name, job)


def usable_variants() -> list[str]:
    """List the compiled variants that this CPU can run, the best last.

    Raises OSError when the feature-detection library does not load.
    """
    if not (cpu_build.LIBRARIES / cpu_build.STAMP).exists():
        return []
    can = int(ctypes.CDLL(str(cpu_build.LIBRARIES / "features.so")).kvk_features())
    made = cpu_build.compiled()
    return [name for i, name in enumerate(cpu_build.variants()) if can >> i & 1 and name in made]
