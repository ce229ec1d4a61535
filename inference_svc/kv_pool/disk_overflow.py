"""Disk overflow of the pool: a file behind its memory, in the same tensors, for longer sequences.

Keys and values of a head lie together, slot after slot (see ``pool``). So each head of each layer has a strip of one
address range: first the slots in memory, which are the pool's as ever, then those in the file, which is mapped there.
Attention cannot tell them apart, and no answer depends on where its pages are. What of the file is in memory is the
system's to say (its page cache), which gives it back to whoever needs memory more, also under a control group's limit.

The file has no name, so that it is gone with the process, and no blocks but for pages that are in use: they are there
before anything is written (``fallocate``), so that a full disk is an error and no SIGBUS, and are given back as soon as
nobody holds them, after which they read as zeros.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import structlog
import torch
from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError, OverflowFailed

from inference_svc.kv_pool.block_table import KEY_BLOCK, PAGE_TOKENS

log = structlog.get_logger("engine")

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02  # fallocate(2)
_FIXED, _NORESERVE = 0x10, 0x4000  # mmap(2)


class DiskOverflow:
    """Memory of a pool and the file behind it, in the same tensors.

    Only the engine's thread uses it, except for the tensors' contents. ``keys`` and ``values`` are ``[layers, kv_heads,
    slots, head_dim]``, as a pool's. Pages ``0`` to ``memory_pages`` are in memory, followed by padding; those in the
    file are ``first_page`` and the ``pages - 1`` after it.
    """

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
        """Creates the file, of no size on disk, in ``folder``. Raises ConfigurationError, also where the file system
        cannot promise blocks."""
        self.folder, self._page_bytes = folder, PAGE_TOKENS * head_dim * dtype.itemsize
        self._file = self._opened(folder)
        # Of pages so small that a block has several, so many get one together.
        self._group = max(1, max(mmap.PAGESIZE, os.fstatvfs(self._file).f_frsize) // self._page_bytes)
        self._refused = False  # to give blocks back, which is said once
        self._users: dict[int, set[int]] = {}  # the groups with blocks, each with its pages that are in use
        self.memory_pages = max(1, memory_tokens // PAGE_TOKENS)
        self.first_page = self._whole(self.memory_pages + KEY_BLOCK // PAGE_TOKENS)
        self.pages = self._whole(-(-tokens // PAGE_TOKENS))
        self._head_bytes = (self.first_page + self.pages) * self._page_bytes
        self._file_bytes = self.pages * self._page_bytes  # of each strip
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
        """Size of the file if all of it were in use."""
        return self._strips * self._file_bytes

    @property
    def backed_pages(self) -> int:
        """Pages that have disk blocks now."""
        return len(self._users) * self._group

    def reserve_disk(self, page: int, pages: int) -> None:
        """Allocates disk blocks for pages before they are written. Raises OverflowFailed, with nothing changed."""
        used = range(page - self.first_page, page - self.first_page + pages)
        fresh = [g for g in range(used[0] // self._group, used[-1] // self._group + 1) if g not in self._users]
        try:
            for groups in runs_of(fresh):
                self._change(_KEEP_SIZE, groups)
        except OSError as error:
            # What a file system does not take back is zeros still, and whoever gets these pages next finds it there.
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
        """Returns the disk blocks of unreferenced pages, which then read as zeros."""
        first, gone = page - self.first_page, list[int]()
        for p in range(first, first + pages):
            group = p // self._group
            users = self._users.get(group, set())
            users.discard(p)
            if users:  # others have a part of its block: of that only this one's is cleared
                self._take_blocks(range(p, p + 1), self._page_bytes)
            elif self._users.pop(group, None) is not None:
                gone.append(group)
        for groups in runs_of(gone):
            self._take_blocks(groups, self._group * self._page_bytes)

    # ---- parts ----------------------------------------------------------------------------------------------

    def _whole(self, pages: int) -> int:
        """Rounds pages up so that every strip fills whole memory pages and file blocks."""
        each = mmap.PAGESIZE // min(mmap.PAGESIZE, self._page_bytes & -self._page_bytes)
        each = math.lcm(each, self._group)
        return -(-pages // each) * each

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
        """Raises OSError where blocks cannot be allocated ahead, or freed."""
        _fallocate(self._file, _KEEP_SIZE, 0, mmap.PAGESIZE)
        _fallocate(self._file, _KEEP_SIZE | _PUNCH_HOLE, 0, mmap.PAGESIZE)

    def _mapped(self, first: int, strips: int) -> ctypes.Array[ctypes.c_char]:
        """Maps memory for strips, each with its part of the file in it."""
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
        """Punches holes for units of ``each`` bytes, all written, in every strip.

        Where the file system refuses (one that copies on write may, when it is full) the units are zeroed instead and
        keep their blocks for the next owner: no page is lost, and none shows an earlier sequence's contents.
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
        """Allocates or frees the blocks of groups of pages, in every strip. Raises OSError."""
        each = self._group * self._page_bytes
        for strip in range(self._strips):
            _fallocate(self._file, mode, strip * self._file_bytes + groups.start * each, len(groups) * each)


def _mmap(at: int, size: int, flags: int, handle: int, offset: int) -> int:
    """The address of a new mapping. Raises OSError."""
    found = _libc.mmap(at or None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, handle, offset)
    if found == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)


def _fallocate(handle: int, mode: int, at: int, size: int) -> None:
    """Raises OSError."""
    while _libc.fallocate(handle, mode, at, size):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def runs_of(rising: Iterable[int]) -> list[range]:
    """Groups rising numbers into as few ranges as possible."""
    found = (list(run) for _, run in groupby(enumerate(rising), lambda one: one[1] - one[0]))
    return [range(run[0][1], run[-1][1] + 1) for run in found]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t], *[ctypes.c_int] * 3, ctypes.c_long]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
