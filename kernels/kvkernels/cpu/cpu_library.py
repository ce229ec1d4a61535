"""The compiled CPU kernels: which variant this CPU runs, loaded, and on which threads.

A job is a structure that C++ and Python both describe; its first field counts what threads have taken of it.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvkernels.cpu import cpu_build
from kvkernels.cpu.thread_pool import run_own, run_team


class Library:
    """One variant's library. Raises OSError when it does not load."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.c = ctypes.CDLL(str(cpu_build.LIBRARIES / f"{name}.so"))

    def kernel(self, name: str, job: type[ctypes.Structure]) -> Kernel:
        """The kernel ``kvk_{name}``. Raises RuntimeError when it takes another job."""
        size = self.number(f"{name}_bytes")
        if size != ctypes.sizeof(job):
            raise RuntimeError(f"{self.name}'s {name} takes {size} bytes, not {ctypes.sizeof(job)}: build it anew")
        return Kernel(self.c, f"kvk_{name}")

    def number(self, name: str, *arguments: int) -> int:
        """What the function ``kvk_{name}`` of integers returns."""
        function = getattr(self.c, f"kvk_{name}")
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_int64] * len(arguments)
        return int(function(*arguments))

    def function(self, name: str, *arguments: Any) -> Any:
        """The function ``kvk_{name}`` of such arguments, which returns nothing."""
        function = getattr(self.c, f"kvk_{name}")
        function.restype, function.argtypes = None, arguments
        return function


class Kernel:
    """A function of a job. Calls release the GIL."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library = library  # its code goes when this does
        self._call: Any = getattr(library, name)
        self._call.argtypes, self._call.restype = [ctypes.c_void_p], None
        self.address = ctypes.cast(self._call, ctypes.c_void_p)

    def apart(self, job: ctypes.Structure, threads: int) -> None:
        """On so many threads, this one and some that are not torch's."""
        run_own(self._call, ctypes.addressof(job), threads)

    def together(self, job: ctypes.Structure, threads: int) -> None:
        """On so many threads of torch's team, this one among them."""
        if threads == 1:
            self._call(ctypes.addressof(job))
        else:
            run_team(self.address, self._call, ctypes.addressof(job), threads)


@dataclass(frozen=True)
class Call:
    """A kernel and its job, whose first ``counters`` fields are zero before it runs. ``held`` is what the job points
    to. Where the job has ``rows``, they are a multiple of ``rounded``."""

    kernel: Kernel
    job: ctypes.Structure
    held: tuple[Any, ...]
    counters: int = 1
    rounded: int = 1

    def together(self, threads: int) -> None:
        """Once; see ``Kernel.together``."""
        self.kernel.together(self.job, threads)


@dataclass(frozen=True)
class Found:
    """The best variant's library, or why there is none and what to do about it."""

    library: Library | None
    why: str
    advice: str = ""


@cache
def found() -> Found:
    """What serves on this machine."""
    names, again = cpu_build.variants(), "python -m kvkernels.cpu"
    stamp = cpu_build.LIBRARIES / cpu_build.STAMP
    if not names:
        return Found(None, f"there are no CPU kernels for {cpu_build.architecture()}")
    if not stamp.exists():
        advice = f"install g++, or pip install ziglang; then {again}"
        return Found(None, "the CPU kernels were not compiled when kvsidecar was installed", advice)
    try:
        if stamp.read_text() != cpu_build.fingerprint(cpu_build.sources()):
            return Found(None, "the CPU kernels are older than their sources", again)
        runs = usable()
        if not runs:
            return Found(None, f"this CPU has none of {', '.join(names)}")
        return Found(Library(runs[-1]), f"C++, {runs[-1]}")
    except OSError as error:
        return Found(None, f"the CPU kernels do not load: {error}", again)


def best(name: str, job: type[ctypes.Structure]) -> Kernel | None:
    """The kernel ``kvk_{name}`` of the variant that serves here; None where none does."""
    library = found().library
    return None if library is None else library.kernel(name, job)


def usable() -> list[str]:
    """The compiled variants that this CPU can run, the best last. Raises OSError when what tells does not load."""
    if not (cpu_build.LIBRARIES / cpu_build.STAMP).exists():
        return []
    can = int(ctypes.CDLL(str(cpu_build.LIBRARIES / "features.so")).kvk_features())
    made = cpu_build.compiled()
    return [name for i, name in enumerate(cpu_build.variants()) if can >> i & 1 and name in made]
