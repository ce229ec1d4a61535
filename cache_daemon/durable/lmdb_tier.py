"""LMDB tier: the durable tier on disk, with recovery of corrupt files.

LMDB writes; reads bypass it. Before LMDB opens a file, the tier checks it and repairs it if necessary. Memory holds one
``payload_reader.StoredEntry`` per chunk: offset, length, checksum and parent. Headers are read once, at ``load``.

The caller enforces the budget: the sum of ``stored_bytes`` must stay below it. The file stays within one and a half
times the budget (at least 1 MiB): random insertions and removals make the file a quarter larger than its live data, and
another quarter is reserved for removals, which must be possible when the disk is full.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import structlog
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.errors import StoreUnavailable

from cache_daemon.durable.compaction import rebuild
from cache_daemon.durable.compression_policy import MIN_CALIBRATION_BYTES, Compression, CompressionPolicy
from cache_daemon.durable.disk_space import PROBE_BYTES, DiskSpace, is_full
from cache_daemon.durable.durable_tier import (
    Loaded,
    LoadReport,
    OutOfSpace,
    PutResult,
    ReadJob,
    ReadResult,
    TierFailed,
    Usage,
    WriteGroup,
)
from cache_daemon.durable.encryption import cipher_for
from cache_daemon.durable.lmdb_env import LmdbEnvironment, ShortWrite
from cache_daemon.durable.lmdb_file import KeyLookup, LmdbCorruption, Node, PageFile, check_overflow
from cache_daemon.durable.payload_reader import PayloadReader, StoredEntry
from cache_daemon.durable.record_format import (
    HEADERS,
    MINIMUM_VALUE_BYTES,
    PAYLOADS,
    CorruptRecord,
    decode_record,
    decrypt_header,
)
from cache_daemon.durable.recovery import open_data
from cache_daemon.durable.store_dir import StoreDir
from cache_daemon.durable.store_scan import strict_scan
from cache_daemon.durable.tier_contents import TierContents, gc_paused, load_order, read_contents
from cache_daemon.durable.write_batch import ChildIndex, WriteBatch, apply_batch, encode_chunks

log = structlog.get_logger("cache_daemon")


class LmdbTier:
    """The durable tier on LMDB.

    Raises StoreUnavailable when the store cannot be opened, ConfigurationError for a bad key. ``strict`` flushes every
    transaction with its meta page; otherwise a power cut may undo the last transaction, never more. ``key`` encrypts
    the store with XAES-256-GCM; the store remembers whether it has a key, and which.
    """

    def __init__(
        self,
        folder: Path,
        budget_bytes: int,
        strict: bool = False,
        compression: Compression = "auto",
        key: bytes | None = None,
        replace_other_formats: bool = False,
    ) -> None:
        self._replace_other_formats = replace_other_formats
        self._cipher, self._strict, self._disk_space = cipher_for(key), strict, DiskSpace(budget_bytes)
        self._folder = StoreDir(folder)
        self._writing = threading.Lock()
        self._entries: dict[bytes, StoredEntry] = {}
        self._children = ChildIndex({})
        self._notes: dict[bytes, bytes] = {}
        self._live_bytes = self._order = 0
        self._report = LoadReport()
        self._failed = self._rewrite = self._closed = False
        try:
            self._contents: TierContents | None = self._open()
        except (OSError, OutOfSpace, TierFailed, LmdbCorruption) as error:
            self._folder.release()
            raise StoreUnavailable(
                f"cannot open the store in {folder}: {error}; repair or remove the folder, or choose another --store"
            ) from error
        except BaseException:
            self._folder.release()
            raise
        self._compressor = CompressionPolicy(compression)
        self._reader = PayloadReader(lambda prefix_hash: self._entries.get(prefix_hash), self._cipher)

    def _open(self) -> TierContents:
        """Check, repair and open the data file.

        Raises StoreUnavailable, OSError, OutOfSpace, TierFailed, LmdbCorruption.
        """
        with gc_paused():
            return self._open_or_rewrite(skip_unreadable=True)

    def _open_or_rewrite(self, skip_unreadable: bool = False) -> TierContents:
        try:
            return self._open_checked()
        except (LmdbCorruption, OSError) as error:  # LMDB found corruption that the scan did not find, or a read failed
            if isinstance(error, OSError) and not (skip_unreadable and error.errno == errno.EIO):
                raise
            self._rewrite = True
            return self._open_checked()

    def _open_checked(self) -> TierContents:
        scan = open_data(
            self._folder, self._cipher, rewrite=self._rewrite, replace_other_formats=self._replace_other_formats
        )
        contents = read_contents(scan, self._cipher)
        if scan.file.size_bytes > self._disk_space.max_bytes and contents.live_bytes * 5 // 4 < scan.file.size_bytes:
            log.info("compacting", file_bytes=scan.file.size_bytes, live_bytes=contents.live_bytes)
            try:
                rebuild(self._folder, scan, self._cipher, keep_damaged=False)
            except (OSError, OutOfSpace, TierFailed) as error:
                log.warning("the store stays too large", error=str(error))
            else:
                scan = strict_scan(PageFile(self._folder.data))
                contents = read_contents(scan, self._cipher)
        assert scan.meta is not None
        self._file, self._meta = scan.file, scan.meta
        self._env = LmdbEnvironment(
            self._folder.path, self._disk_space.map_bytes(self._meta.needed_bytes), metasync=self._strict
        )
        self._refresh_meta()
        self._entries, self._children = contents.entries, ChildIndex(contents.entries)
        self._live_bytes, self._order = contents.live_bytes, contents.last_order
        self._notes = contents.notes
        self._failed = self._rewrite = False
        return contents

    # ---- load ----------------------------------------------------------------------------------------------

    @property
    def load_report(self) -> LoadReport:
        return self._report

    def load(self) -> Iterable[Loaded]:
        contents, self._contents = self._contents, None
        if contents is None:
            raise RuntimeError("load was called before; it is called once, at start")
        self._report = contents.report
        if contents.useless:
            log.warning("dropping stored chunks", corrupt=self._report.corrupt, orphaned=self._report.orphaned)
            try:
                self.apply(WriteGroup(remove=contents.useless, notes=dict.fromkeys(contents.useless_notes)))
            except (OutOfSpace, TierFailed) as error:
                log.warning("what is useless stays on disk", error=str(error))
        return [
            Loaded(header, contents.ticks.get(key, 0), self._entries[key].stored_bytes)
            for key, header in load_order(contents)
            if key in self._entries
        ]

    def header(self, prefix_hash: bytes) -> ChunkHeader | None:
        """Read a stored chunk's header from disk; None when the chunk is missing or corrupt. Raises OSError."""
        with self._writing:
            try:
                finder = KeyLookup(self._file, self._meta)
                node = finder.find(HEADERS, prefix_hash)
                if node is None:
                    return None
                return decrypt_header(self._cipher, prefix_hash, decode_record(prefix_hash, finder.value(node)))
            except (CorruptRecord, LmdbCorruption):
                return None

    def stored_keys(self) -> list[bytes]:
        """Return the prefix hashes of all chunks, parents before children."""
        found = [key for key, entry in list(self._entries.items()) if entry.parent not in self._entries]
        for key in found:
            found += self._children.children_of(key)
        return found

    def first_of(self, root: bytes) -> bytes | None:
        """Return the prefix hash of a first chunk of a tenant root, or None."""
        return next(iter(self._children.children_of(root)), None)

    # ---- read ----------------------------------------------------------------------------------------------

    def read(self, jobs: Sequence[ReadJob]) -> list[ReadResult]:
        return self._reader.read(jobs)

    def notes(self) -> dict[bytes, bytes]:
        return dict(self._notes)

    def usage(self) -> Usage:
        return Usage(self._file.size_bytes, self._live_bytes, len(self._entries))

    # ---- write ---------------------------------------------------------------------------------------------

    def apply(self, group: WriteGroup) -> list[PutResult]:
        with self._writing:
            self._ensure_open()
            packed = encode_chunks(group.put, self._compressor, self._cipher, self._order)
            self._order += len(packed)
            changes = WriteBatch(self._entries, self._children)
            for key in group.remove:
                changes.remove(key)
            for chunk in packed:
                if chunk is not None:
                    changes.put(chunk)
            changes.remove_orphans()
            self._write(group, changes)
            self._update_memory(group, changes)
            self._calibrate_compression(group)
            return [changes.result(chunk) for chunk in packed]

    def _ensure_open(self) -> None:
        """Reopen the store after a failure, or when its file has shrunk. Raises TierFailed."""
        try:
            if not self._failed and self._folder.data.stat().st_size >= self._meta.needed_bytes:
                return
            if not self._failed:
                self._fail()
            self._open_or_rewrite()  # leaves garbage collection on: the daemon is serving
            log.info("the store is open again", chunks=len(self._entries))
        except (OSError, OutOfSpace, TierFailed, LmdbCorruption, StoreUnavailable) as error:
            self._fail()
            raise TierFailed(f"the store cannot be opened again: {error}") from error

    def _fail(self, rewrite: bool = False) -> None:
        """Refuse writes until the store is reopened; ``rewrite`` makes the reopening rebuild the file."""
        self._env.close()  # has no effect on a closed environment
        self._failed, self._rewrite = True, self._rewrite or rewrite

    def _write(self, group: WriteGroup, changes: WriteBatch) -> None:
        size = sum(packed.record.stored_bytes for packed in changes.stored.values())
        full = False
        try:
            self._check_removals(changes)
            full = bool(changes.stored) and not self._reserve(changes)
            try:
                self._transact(group, changes)
            except OutOfSpace:
                self._use_reserve(group, changes)
        except OutOfSpace:
            raise
        except LmdbCorruption as error:
            self._fail(rewrite=True)
            raise TierFailed(f"the store is damaged: {error}") from error
        except (TierFailed, OSError) as error:
            self._fail()
            if isinstance(error, ShortWrite) and (full or is_full(self._folder.path, size + PROBE_BYTES)):
                raise OutOfSpace(f"the disk is full: {error}") from error
            raise TierFailed(str(error)) from error

    def _reserve(self, changes: WriteBatch) -> bool:
        """Reserve disk space for the chunks of a group; see ``DiskSpace.reserve``.

        If there is none, tries again with the pages that the last transaction freed.
        """
        records = [packed.record for packed in changes.stored.values()]
        data, map_bytes = self._folder.data, self._env.map_bytes
        try:
            return self._disk_space.reserve(data, self._file, self._meta, records, map_bytes)
        except OutOfSpace as refusal:
            try:
                self._commit_empty()
            except ShortWrite:
                self._fail()
                raise refusal from None
            self._refresh_meta()
            return self._disk_space.reserve(data, self._file, self._meta, records, map_bytes)

    def _commit_empty(self) -> None:
        """Commit an empty transaction: only then does LMDB reuse the pages that the last transaction freed."""
        self._transact(WriteGroup(), WriteBatch(self._entries, self._children))

    def _use_reserve(self, group: WriteGroup, changes: WriteBatch) -> None:
        """Apply a group with the help of the part of the map that is reserved for removals.

        A group of removals is applied within the reserve. For a group that stores chunks, an empty transaction is first
        committed within the reserve. The group itself is applied without the reserve.
        """
        before = self._env.map_bytes
        self._env.resize(before + self._disk_space.reserve_bytes)
        try:
            if changes.stored:
                self._commit_empty()
            else:
                self._transact(group, changes)
        finally:
            self._env.resize(before)
            self._refresh_meta()
        if changes.stored:
            self._transact(group, changes)

    def _check_removals(self, changes: WriteBatch) -> None:
        """Check page headers before removals, since LMDB trusts them.

        Raises LmdbCorruption, OSError.
        """
        finder = KeyLookup(self._file, self._meta)
        gone = (*changes.removed, *(key for key in changes.stored if key in self._entries))
        for key in gone:
            entry = self._entries.get(key)
            node = finder.find(PAYLOADS, key) if entry is None else None
            if entry is not None:
                node = Node(key, max(entry.stored_length, MINIMUM_VALUE_BYTES), None, entry.offset)
            if node is not None:
                check_overflow(self._file, node)

    def _transact(self, group: WriteGroup, changes: WriteBatch) -> None:
        with self._env.transaction() as txn:
            apply_batch(txn, self._cipher, group, changes)

    def _update_memory(self, group: WriteGroup, changes: WriteBatch) -> None:
        """Update the entries in memory to the state on disk."""
        for key in (*changes.removed, *changes.stored):
            entry = self._entries.pop(key, None)
            if entry is not None:
                self._children.discard(key, entry.parent)
                self._live_bytes -= entry.stored_bytes
        for name, value in group.notes.items():
            self._notes.pop(name, None)
            if value is not None:
                self._notes[name] = value
        try:
            self._refresh_meta()
            self._find_places(changes)
        except (LmdbCorruption, OSError) as error:
            self._fail(rewrite=isinstance(error, LmdbCorruption))
            raise TierFailed(f"what was written cannot be read: {error}") from error

    def _find_places(self, changes: WriteBatch) -> None:
        finder = KeyLookup(self._file, self._meta)
        for key, packed in changes.stored.items():
            node = finder.find(PAYLOADS, key)
            if node is None or node.value is not None:
                raise LmdbCorruption("a payload that was written is not there")
            record = packed.record
            entry = StoredEntry(
                self._file, node.offset, record.stored_length, record.stored_checksum, record.codec, packed.parent,
                record.stored_bytes,
            )  # fmt: skip
            self._entries[key] = entry
            self._children.add(key, packed.parent)
            self._live_bytes += record.stored_bytes

    def _refresh_meta(self) -> None:
        self._meta = self._file.metas()[0]

    def _calibrate_compression(self, group: WriteGroup) -> None:
        if self._compressor.active is None and group.put and self._live_bytes >= MIN_CALIBRATION_BYTES:
            self._compressor.calibrate(self._folder.data, list(self._entries.values()), group.put)

    # ---- compact, close ------------------------------------------------------------------------------------

    def compact(self) -> None:
        with self._writing:
            self._ensure_open()
            before = self._file.size_bytes
            try:
                scan = strict_scan(self._file)
                self._env.close()
                self._failed = True
                rebuild(self._folder, scan, self._cipher, keep_damaged=False)
                self._open()
            except LmdbCorruption as error:
                self._fail(rewrite=True)
                raise TierFailed(f"the store is damaged: {error}") from error
            except (OSError, StoreUnavailable) as error:
                self._fail()
                raise TierFailed(f"the store cannot be compacted: {error}") from error
            log.info("compacted", before_bytes=before, after_bytes=self._file.size_bytes)

    def close(self) -> None:
        """Flush and release the folder. Idempotent."""
        with self._writing:
            if self._closed:
                return
            self._closed = True
            self._reader.close()
            self._compressor.close()
            if not self._failed:
                with contextlib.suppress(OutOfSpace, TierFailed, LmdbCorruption):
                    self._env.sync()
                self._env.close()
            self._folder.release()
