"""Memory in pages of 2 MiB.

A product reads each weight once per step. With pages of 4 KiB, the processor translates an address every 4 KiB; in a
virtual machine, through two page tables. ``docs/adr/096-large-pages.md`` has the measurements.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
_HUGEPAGE, _COLLAPSE = 14, 25  # madvise(2); the latter since Linux 6.1
_COLLAPSE_STEP = 32 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def allocate(size_bytes: int) -> Tensor:
    """Allocate zeroed memory, uint8 ``[size_bytes]``, in large pages if the system has them.

    It is aligned to its pages. The system commits pages on the first write. Raises OSError.
    """
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    large = size_bytes >= PAGE_BYTES
    # Private: most systems give no large pages to shared memory. Some align a mapping to small pages only.
    room = mmap.mmap(-1, size_bytes + large * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(room, dtype=torch.uint8)
    if not large:
        return memory
    memory = memory[-memory.data_ptr() % PAGE_BYTES :][:size_bytes]
    _advise(memory.data_ptr(), size_bytes, _HUGEPAGE)
    return memory


def collapse(memory: Tensor) -> None:
    """Move written memory from small to large pages, if the system can. Keeps the contents."""
    for at in range(0, memory.nbytes, _COLLAPSE_STEP):
        if not _advise(memory.data_ptr() + at, min(_COLLAPSE_STEP, memory.nbytes - at), _COLLAPSE):
            return


def large_bytes(memory: Tensor) -> int:
    """Return the bytes of the mapping of ``memory`` that are in large pages; 0 if the system does not report it."""
    try:
        lines = Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    inside = False
    for line in lines:
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, _, end = name.partition("-")
            inside = int(first, 16) <= memory.data_ptr() < int(end, 16)
        elif inside and name == "AnonHugePages:":
            return int(rest.split()[0]) << 10
    return 0


@cache
def describe() -> str:
    """Describe in one line whether this process gets large pages. Tries it once, with 4 MiB."""
    probe = allocate(2 * PAGE_BYTES)
    probe.fill_(1)
    collapse(probe)
    if large_bytes(probe):
        return "2 MiB"
    return "4 KiB: the system gives no pages of 2 MiB (/sys/kernel/mm/transparent_hugepage/enabled)"


def _advise(address: int, size_bytes: int, advice: int) -> bool:
    """Call madvise(2) without the GIL; False if the system refuses."""
    return not _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), advice)
