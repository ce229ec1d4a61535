"""Kernels that follow each other, run by one call: between two small ones, Python and the start of a team would take
longer than they do (``kernels/cpu/chain.cpp``)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from kvkernels.cpu.cpu_library import Call, Kernel, Library, found

_ALIGN = 64


class _Link(ctypes.Structure):
    """``Link`` in jobs.h."""

    _fields_ = (
        ("inside", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("run", "job")),
        ("counters", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("multiple", ctypes.c_int64),
        ("beyond", ctypes.c_int64 * 2),
    )


class _Job(ctypes.Structure):
    """``ChainJob`` in jobs.h."""

    _fields_ = (("links", ctypes.c_void_p), ("count", ctypes.c_int64), ("rows", ctypes.c_int64))


@cache
def _kernel(library: Library) -> Kernel:
    if library.number("link_bytes") != ctypes.sizeof(_Link):
        raise RuntimeError(f"{library.name}'s link is not the one of this version: build it anew")
    return library.kernel("chain", _Job)


class Chain:
    """Calls one after the other, again and again, for any number of rows up to the one for which they were made."""

    def __init__(self, calls: Sequence[Call]) -> None:
        """Raises RuntimeError without kernels."""
        library = found().library
        if library is None:
            raise RuntimeError(found().why)
        self._kernel, self._begin = _kernel(library), library.function("chain_begin", ctypes.c_void_p)
        self._calls = list(calls)
        size = ctypes.sizeof(_Link)
        self._memory = ctypes.create_string_buffer(len(calls) * size + _ALIGN)
        first = -(-ctypes.addressof(self._memory) // _ALIGN) * _ALIGN
        for i, call in enumerate(calls):
            link, job = _Link.from_address(first + i * size), ctypes.addressof(call.job)
            link.run, link.job, link.counters = call.kernel.address, job, call.counters
            if hasattr(call.job, "rows"):
                link.rows, link.multiple = job + type(call.job).rows.offset, call.rounded
        self._job = _Job(first, len(calls), 0)

    def run(self, rows: int, threads: int) -> None:
        """All of them, over ``rows`` rows, on so many threads of torch's team. Releases the GIL."""
        self._job.rows = rows
        self._begin(ctypes.addressof(self._job))
        self._kernel.together(self._job, threads)
