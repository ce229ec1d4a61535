"""Disk space: the size limit of the data file, and the reserve for removals."""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
from collections.abc import Sequence
from pathlib import Path

from kvsidecar.byte_sizes import format_size

from cache_daemon.durable.durable_tier import PAGE_BYTES, OutOfSpace
from cache_daemon.durable.lmdb_file import LmdbCorruption, MetaPage, PageFile
from cache_daemon.durable.page_walk import PageWalk
from cache_daemon.durable.record_format import Record

# Errors of a full disk, an exhausted quota, or a file size limit.
DISK_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_MIN_FILE_BYTES = 1 << 20
_MIN_RESERVE_BYTES = 32 * PAGE_BYTES
_DISK_RESERVE_BYTES = 64 * PAGE_BYTES  # enough for a few single removals; each frees more than it needs
PROBE_BYTES = 64 * PAGE_BYTES  # if the disk refuses this much in addition to a group, it counts as full
_TREE_PAGES = 16  # tree pages of a group; more than its path to the root


class DiskSpace:
    """Space limits of a data file.

    ``max_bytes`` limits the file; the last ``reserve_bytes`` of it are for removals only.
    """

    def __init__(self, budget_bytes: int) -> None:
        most = max(_MIN_FILE_BYTES, budget_bytes * 3 // 2)
        self.max_bytes = most // PAGE_BYTES * PAGE_BYTES
        self.reserve_bytes = max(_MIN_RESERVE_BYTES, self.max_bytes // 64 // PAGE_BYTES * PAGE_BYTES)

    def map_bytes(self, needed_bytes: int) -> int:
        """Return the map size for chunks. A file that is already larger keeps its size until compaction."""
        return max(self.max_bytes - self.reserve_bytes, needed_bytes)

    def reserve(self, data: Path, file: PageFile, meta: MetaPage, records: Sequence[Record], map_bytes: int) -> bool:
        """Allocate disk space for a group of chunks and for removals after it.

        Extends the file beyond the part that LMDB has filled, because the file system cannot refuse allocated space
        later. Returns False if the disk is full, but the group fits into free parts of the file. Raises OutOfSpace if
        it does not, and OSError.
        """
        reserve = min(self.reserve_bytes, _DISK_RESERVE_BYTES)
        size_bytes = sum(record.stored_bytes for record in records)
        wanted = min(meta.needed_bytes + size_bytes + _TREE_PAGES * PAGE_BYTES + reserve, map_bytes)
        if file.size_bytes >= wanted:
            return True
        try:
            allocate(data, file.size_bytes, wanted)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            runs = self._free_runs(file, meta)
            if sum(runs) * PAGE_BYTES < size_bytes + reserve or not _fit([r.value_pages for r in records], runs):
                left, adjacent = format_size(sum(runs) * PAGE_BYTES), format_size(max(runs, default=0) * PAGE_BYTES)
                raise OutOfSpace(
                    f"the disk is full: {format_size(size_bytes)} are to be stored; the file has {left} free, "
                    f"at most {adjacent} in one piece"
                ) from error
            return False
        return True

    @staticmethod
    def _free_runs(file: PageFile, meta: MetaPage) -> list[int]:
        """Return the lengths in pages of the file's free parts that the next transaction may use."""
        try:
            free = PageWalk(file, meta).free_pages(before=meta.transaction)
        except LmdbCorruption:
            return []
        return [len(run) for run in free.split(b"\0") if run]


def _fit(values: Sequence[int], runs: Sequence[int]) -> bool:
    """Return True if values fit into free parts of a file; both are numbers of adjacent pages.

    The longest values come first, each into the longest part that is left.
    """
    left = [-run for run in runs]
    heapq.heapify(left)
    for value in sorted(values, reverse=True):
        if not left or -left[0] < value:
            return False
        heapq.heapreplace(left, left[0] + value)
    return True


def is_full(folder: Path, wanted_bytes: int) -> bool:
    """Return True when the file system refuses a file of that size.

    Where allocation is not supported, compares with the free space.
    """
    probe = folder / "probe"
    try:
        probe.touch(0o600)
        allocate(probe, 0, wanted_bytes)
    except OSError as error:
        return error.errno in DISK_FULL
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize < wanted_bytes


def allocate(data: Path, begin: int, end: int) -> None:
    """Allocate a range of the file on disk, extending it.

    Raises OSError; does nothing where the file system cannot allocate.
    """
    handle = os.open(data, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(handle, begin, end - begin)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
    finally:
        os.close(handle)
