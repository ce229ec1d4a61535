"""Sequence of CPU kernels launched by one call, like a CUDA graph.

Between small kernels, Python and the start of an OpenMP team take longer than the kernels themselves
(``kernels/cpu/cpu_graph.cpp``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from kvkernels.cpu.cpu_library import Kernel, KernelCall, KernelLibrary, loaded_library

_ALIGN = 64


class _GraphNode(ctypes.Structure):
    """``GraphNode`` in jobs.h."""

    _fields_ = (
        ("running_threads", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("run", "job")),
        ("counters", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("padding", ctypes.c_int64 * 3),
    )


class _Job(ctypes.Structure):
    """``CpuGraphJob`` in jobs.h."""

    _fields_ = (("nodes", ctypes.c_void_p), ("count", ctypes.c_int64), ("rows", ctypes.c_int64))


@cache
def _kernel(library: KernelLibrary) -> Kernel:
    if library.number("graph_node_bytes") != ctypes.sizeof(_GraphNode):
        raise RuntimeError(f"{library.name}'s graph node has another size: build it anew")
    return library.kernel("cpu_graph", _Job)


class KernelGraph:
    """Recorded kernel calls, replayed in order for any number of rows up to the recorded one."""

    def __init__(self, calls: Sequence[KernelCall]) -> None:
        """Record the calls. Raises RuntimeError without kernels."""
        library = loaded_library().library
        if library is None:
            raise RuntimeError(loaded_library().why)
        self._kernel, self._begin = _kernel(library), library.function("cpu_graph_begin", ctypes.c_void_p)
        self._calls = list(calls)
        size = ctypes.sizeof(_GraphNode)
        self._memory = ctypes.create_string_buffer(len(calls) * size + _ALIGN)
        first = -(-ctypes.addressof(self._memory) // _ALIGN) * _ALIGN
        for i, call in enumerate(calls):
            node, job = _GraphNode.from_address(first + i * size), ctypes.addressof(call.job)
            node.run, node.job, node.counters = call.kernel.address, job, call.counters
            if hasattr(call.job, "rows"):
                node.rows = job + type(call.job).rows.offset
        self._job = _Job(first, len(calls), 0)

    def run(self, rows: int, threads: int, count: int | None = None) -> None:
        """Run the first ``count`` calls, or all, over ``rows`` rows on ``threads`` threads of torch's OpenMP team.

        Releases the GIL.
        """
        self._job.rows, self._job.count = rows, len(self._calls) if count is None else count
        self._begin(ctypes.addressof(self._job))
        self._kernel.run_on_openmp_team(self._job, threads)
