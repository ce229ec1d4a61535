"""Payload reader: reads and verifies payloads in parallel, without LMDB or the GIL.

It uses ``pread`` instead of LMDB's map: a page fault reads one page at a time (51 MB/s), or too much with readahead,
and a truncated file would raise SIGBUS instead of a short read.

The reader opens no read transaction. LMDB reuses the pages of an entry only after the entry was removed. So if the
checksum rejects the bytes, either the file is corrupt or the entry was removed meanwhile. The reader then looks the
entry up again to find out which.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kvsidecar import keys

from cache_daemon.durable import payload_codec
from cache_daemon.durable.durable_tier import ReadJob, ReadResult
from cache_daemon.durable.encryption import Cipher, DecryptError
from cache_daemon.durable.lmdb_file import PageFile
from cache_daemon.durable.record_format import PAYLOADS

THREADS = 4
_ATTEMPTS = 4
_SMALL_SCRATCH_BYTES = 64 << 20
_local = threading.local()


class StoredEntry(NamedTuple):
    """A stored chunk: the location of its payload, and the metadata that the tier needs.

    ``file`` is the file that contains the payload.
    """

    file: PageFile
    offset: int
    stored_length: int
    stored_checksum: int
    codec: int
    parent: bytes
    stored_bytes: int


class PayloadReader:
    """Reads payloads with a thread pool.

    ``find`` returns the current entry of a prefix hash; any thread may call it.
    """

    def __init__(self, find: Callable[[bytes], StoredEntry | None], cipher: Cipher) -> None:
        self._find, self._cipher = find, cipher
        self._pool = ThreadPoolExecutor(THREADS, "durable-read")

    def read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]:
        """Return one result per job. Several jobs run in parallel, in disk order."""
        entries = [self._find(job.prefix_hash) for job in jobs]
        if len(jobs) == 1:
            return [self._read(jobs[0])]
        order = sorted(range(len(jobs)), key=lambda i: entry.offset if (entry := entries[i]) else -1)
        done = dict(zip(order, self._pool.map(self._read, [jobs[i] for i in order]), strict=True))
        return [done[i] for i in range(len(jobs))]

    def close(self) -> None:
        self._pool.shutdown()

    def _read(self, job: ReadJob) -> ReadResult:
        result = ReadResult.CORRUPT
        for _ in range(_ATTEMPTS):
            entry = self._find(job.prefix_hash)
            if entry is None:
                return ReadResult.MISSING
            result = self._try(job, entry)
            if result is ReadResult.OK or self._find(job.prefix_hash) is entry:
                return result
        return result

    def _try(self, job: ReadJob, entry: StoredEntry) -> ReadResult:
        try:
            whole = self._fill(job, entry)
        except (OSError, MemoryError):
            return ReadResult.FAILED
        except (ValueError, DecryptError):
            return ReadResult.CORRUPT
        return ReadResult.OK if whole and keys.checksum(job.target) == job.checksum else ReadResult.CORRUPT

    def _fill(self, job: ReadJob, entry: StoredEntry) -> bool:
        """Fill the target; False when lengths differ. Raises OSError, ValueError, DecryptError."""
        is_encrypted = self._cipher.max_overhead > 0
        is_raw = entry.codec == payload_codec.RAW
        if is_raw and not len(job.target) <= entry.stored_length <= len(job.target) + self._cipher.max_overhead:
            return False
        if is_raw and not is_encrypted:
            return entry.file.read_into(job.target, entry.offset)
        stored = _scratch("stored", entry.stored_length)
        if not entry.file.read_into(stored, entry.offset):
            return False
        if not is_encrypted:
            payload_codec.decompress(stored, job.target)
            return True
        place = PAYLOADS + b"\0" + job.prefix_hash
        if is_raw:
            self._cipher.decrypt(place, stored, job.target)
            return True
        packed = _scratch("packed", self._cipher.plain_length(stored))
        self._cipher.decrypt(place, stored, packed)
        payload_codec.decompress(packed, job.target)
        return True


def _scratch(name: str, size_bytes: int) -> memoryview:
    """Return this thread's scratch memory, kept between reads unless it is large."""
    if size_bytes > _SMALL_SCRATCH_BYTES:
        return memoryview(bytearray(size_bytes))
    kept: mmap.mmap | None = getattr(_local, name, None)
    if kept is None or len(kept) < size_bytes:
        kept = mmap.mmap(-1, max(1 << 20, 1 << (size_bytes - 1).bit_length()))
        setattr(_local, name, kept)
    return memoryview(kept)[:size_bytes]
