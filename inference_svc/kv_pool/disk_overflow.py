"""Disk overflow: a mapped file that extends the pool's tensors for long sequences.

The keys (or values) of each head are contiguous in the pool, ordered by slot. So each head of each layer has one strip
of the address range: first the slots in memory, then the slots in the file, which is mapped there. Attention reads both
kinds of slots in the same way, and no answer depends on the location of its blocks. The kernel's page cache decides
which parts of the file are in memory. Under memory pressure, including the limit of a control group, the kernel evicts
parts.

The file has no name, so the system removes it when the process ends. Only KV blocks in use have disk blocks.
``reserve`` allocates disk blocks (``fallocate``) before any write, so that a full disk is an error and not a
SIGBUS. ``release`` frees the disk blocks; the KV blocks then read as zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import ClassVar

import structlog
import torch
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError, OverflowFailed

from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.overflow import count_blocks

log = structlog.get_logger("engine")

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # fallocate(2)
_FIXED, _NORESERVE = 0x10, 0x4000  # mmap(2)


class DiskOverflow:
    """Tensors whose first slots are in memory and whose last slots are in a file.

    Only the engine's thread calls the methods; other threads may read and write the tensors. ``keys`` and ``values``
    have the pool's shape ``[layers, kv_heads, slots, head_dim]``. The first ``memory_pages`` blocks are in memory,
    followed by padding. The file has ``pages`` blocks, from block ``first_page`` on.
    """

    frees_space: ClassVar[bool] = True
    keeps_preempted: ClassVar[bool] = False

    def __init__(
        self,
        folder: Path,
        layers: int,
        kv_heads: int,
        head_dim: int,
        memory_tokens: int,
        tokens: int,
        dtype: torch.dtype,
    ) -> None:
        """Creates the file in ``folder``, without disk blocks.

        Raises ConfigurationError if the folder is unusable, or if its file system cannot allocate disk blocks.
        """
        self.folder, self._page_bytes = folder, PAGE_TOKENS * head_dim * dtype.itemsize
        self._file = self._opened(folder)
        # Number of KV blocks that share a disk block; 1 unless KV blocks are smaller than disk blocks.
        self._group = max(1, max(mmap.PAGESIZE, os.fstatvfs(self._file).f_frsize) // self._page_bytes)
        self._refused = False  # the file system refused to free disk blocks; logged once
        self._users: dict[int, set[int]] = {}  # maps each group with disk blocks to its KV blocks in use
        counts = count_blocks(memory_tokens, tokens, self._page_bytes, mmap.PAGESIZE, self._group)
        self.memory_pages, self.first_page, self.pages = counts
        self._head_bytes = (self.first_page + self.pages) * self._page_bytes
        self._file_bytes = self.pages * self._page_bytes  # bytes of the file per strip
        self._strips = 2 * layers * kv_heads
        try:
            os.ftruncate(self._file, self._strips * self._file_bytes)
            self._try_out()
            shape = (layers, kv_heads, (self.first_page + self.pages) * PAGE_TOKENS, head_dim)
            half = self._strips // 2
            self._ranges = [self._mapped(0, half), self._mapped(half, half)]
        except OSError as error:
            os.close(self._file)
            raise ConfigurationError(
                f"no overflow of {format_size(self.size_bytes)} can be made in {folder}: {error.strerror}; choose "
                "another folder with --overflow-dir, or leave it out with --overflow-bytes 0"
            ) from error
        weakref.finalize(self, os.close, self._file)
        self.keys, self.values = (torch.frombuffer(one, dtype=dtype).view(shape) for one in self._ranges)

    @property
    def size_bytes(self) -> int:
        """Size of the file with all KV blocks in use."""
        return self._strips * self._file_bytes

    @property
    def backed_pages(self) -> int:
        """Number of KV blocks that have disk blocks now."""
        return len(self._users) * self._group

    def reserve(self, page: int, pages: int) -> None:
        """Allocates disk blocks for KV blocks before they are written.

        Raises OverflowFailed if the disk is full; then no KV block gets disk blocks.
        """
        used = range(page - self.first_page, page - self.first_page + pages)
        fresh = [g for g in range(used[0] // self._group, used[-1] // self._group + 1) if g not in self._users]
        try:
            for groups in runs_of(fresh):
                self._change(_KEEP_SIZE, groups)
        except OSError as error:
            # If the file system refuses to free the new disk blocks, they read as zeros; the next owner uses them.
            for groups in runs_of(fresh):
                with contextlib.suppress(OSError):
                    self._change(_KEEP_SIZE | _PUNCH_HOLE, groups)
            size = len(fresh) * self._group * self._page_bytes * self._strips
            raise OverflowFailed(
                f"the prompt and its answer need more than this worker's pool, and {self.folder} has no room for "
                f"{format_size(size)} of them: {error.strerror}; shorten it, or make room there"
            ) from error
        for p in used:
            self._users.setdefault(p // self._group, set()).add(p)

    def release(self, page: int, pages: int) -> None:
        """Frees the disk blocks of unreferenced KV blocks, which then read as zeros."""
        first, gone = page - self.first_page, list[int]()
        for p in range(first, first + pages):
            group = p // self._group
            users = self._users.get(group, set())
            users.discard(p)
            if users:  # another KV block uses the same disk block: clear only this block's part
                self._take_blocks(range(p, p + 1), self._page_bytes)
            elif self._users.pop(group, None) is not None:
                gone.append(group)
        for groups in runs_of(gone):
            self._take_blocks(groups, self._group * self._page_bytes)

    def clear(self, page: int, pages: int) -> None:
        """Does nothing, because released blocks read as zeros."""

    # ---- parts ----------------------------------------------------------------------------------------------

    @staticmethod
    def _opened(folder: Path) -> int:
        try:
            handle, name = tempfile.mkstemp(prefix="overflow-", dir=folder)
        except OSError as error:
            raise ConfigurationError(
                f"the folder {folder} for the overflow cannot be used: {error.strerror}"
            ) from error
        os.unlink(name)
        return handle

    def _try_out(self) -> None:
        """Raises OSError if the file system cannot allocate or free disk blocks."""
        _fallocate(self._file, _KEEP_SIZE, 0, mmap.PAGESIZE)
        _fallocate(self._file, _KEEP_SIZE | _PUNCH_HOLE, 0, mmap.PAGESIZE)

    def _mapped(self, first: int, strips: int) -> ctypes.Array[ctypes.c_char]:
        """Maps ``strips`` strips: the first part of each is memory, the last part is in the file."""
        size, head = strips * self._head_bytes, self.first_page * self._page_bytes
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        start = _mmap(0, size, private, -1, 0)
        out = (ctypes.c_char * size).from_address(start)
        weakref.finalize(out, _libc.munmap, ctypes.c_void_p(start), ctypes.c_size_t(size))
        for strip in range(strips):
            at, offset = start + strip * self._head_bytes + head, (first + strip) * self._file_bytes
            _mmap(at, self._file_bytes, mmap.MAP_SHARED | _FIXED, self._file, offset)
        return out

    def _take_blocks(self, units: range, each: int) -> None:
        """Frees the disk blocks of ``units`` of ``each`` bytes in every strip, by punching holes.

        A copy-on-write file system may refuse when it is full. Then the method zeroes the units, which keep their disk
        blocks for the next owner. No KV block is lost, and no KV block shows an earlier sequence's contents.
        """
        at, size = units.start * each, len(units) * each
        for strip in range(self._strips):
            try:
                _fallocate(self._file, _KEEP_SIZE | _PUNCH_HOLE, strip * self._file_bytes + at, size)
            except OSError as error:
                half, within = divmod(strip, self._strips // 2)
                start = within * self._head_bytes + self.first_page * self._page_bytes + at
                ctypes.memset(ctypes.addressof(self._ranges[half]) + start, 0, size)
                if not self._refused:
                    log.warning("blocks of the overflow are not given back", folder=str(self.folder), error=str(error))
                self._refused = True

    def _change(self, mode: int, groups: range) -> None:
        """Allocates or frees the disk blocks of groups in every strip. Raises OSError."""
        each = self._group * self._page_bytes
        for strip in range(self._strips):
            _fallocate(self._file, mode, strip * self._file_bytes + groups.start * each, len(groups) * each)


def _mmap(at: int, size: int, flags: int, handle: int, offset: int) -> int:
    """Maps memory and returns its address. Raises OSError."""
    found = _libc.mmap(at or None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, handle, offset)
    if found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


def _fallocate(handle: int, mode: int, at: int, size: int) -> None:
    """Calls fallocate(2), and repeats the call after an interrupt. Raises OSError."""
    while _libc.fallocate(handle, mode, at, size):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def runs_of(rising: Iterable[int]) -> list[range]:
    """Groups ascending numbers into the fewest ranges."""
    found = (list(run) for _, run in groupby(enumerate(rising), lambda one: one[1] - one[0]))
    return [range(run[0][1], run[-1][1] + 1) for run in found]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t], *[ctypes.c_int] * 3, ctypes.c_long]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
