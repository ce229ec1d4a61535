"""The durable tier: headers and payloads in LMDB, written in groups, verified on read.

Layout of the environment (three databases):

- ``meta``: ``format``, ``lmdb`` (versions; a store of other versions is refused, not misread) and
  ``verdict:NAMESPACE`` (ReuseVerdict).
- ``headers``: prefix hash -> uint64 big-endian commit number, then the ChunkHeader.
- ``payloads``: prefix hash -> payload.

A header and its payload are written in one transaction. Only the daemon that holds ``daemon.lock`` opens the
environment: LMDB's own locks fail silently across PID namespaces and on read-only mounts.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import lmdb
from google.protobuf.message import DecodeError
from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.errors import StoreUnavailable

FORMAT = b"1"
# Random eviction keeps LMDB's file at about 1.25 times the live bytes; the map must never be the limit.
_MAP_FACTOR = 2.0
_MAP_MINIMUM = 64 << 20
_ORDER_BYTES = 8


@dataclass(frozen=True)
class WriteGroup:
    """One transaction: removals first, then chunks with their payloads."""

    remove: tuple[bytes, ...]
    put: tuple[tuple[ChunkHeader, memoryview], ...]


class DurableTier(Protocol):
    """Chunks that outlive the daemon. ``read_into`` and ``apply`` may be called from any one thread each."""

    def load(self) -> Iterator[ChunkHeader]:
        """Headers of all stored chunks in the order in which they were committed."""
        ...

    def read_into(self, prefix_hash: bytes, target: memoryview) -> bool:
        """Copies a payload; False when it is missing or of another length. The caller checks the checksum."""
        ...

    def apply(self, group: WriteGroup) -> None:
        """Writes a group atomically. Raises OSError when there is no room or the disk fails."""
        ...

    def read_note(self, name: bytes) -> bytes | None:
        """A small value that is no chunk."""
        ...

    def write_note(self, name: bytes, value: bytes) -> None:
        """Keeps a small value. Raises OSError."""
        ...

    def close(self) -> None: ...


class MemoryTier:
    """A durable tier that is none: the reference implementation, for tests."""

    def __init__(self) -> None:
        self._stored: dict[bytes, tuple[ChunkHeader, bytes]] = {}
        self._notes: dict[bytes, bytes] = {}

    def load(self) -> Iterator[ChunkHeader]:
        return iter([header for header, _ in self._stored.values()])

    def read_into(self, prefix_hash: bytes, target: memoryview) -> bool:
        found = self._stored.get(prefix_hash)
        if found is None or len(found[1]) != len(target):
            return False
        target[:] = found[1]
        return True

    def apply(self, group: WriteGroup) -> None:
        for key in group.remove:
            self._stored.pop(key, None)
        for header, payload in group.put:
            self._stored[header.prefix_hash] = (header, bytes(payload))

    def read_note(self, name: bytes) -> bytes | None:
        return self._notes.get(name)

    def write_note(self, name: bytes, value: bytes) -> None:
        self._notes[name] = value

    def close(self) -> None: ...


class LmdbTier:
    """The durable tier on disk. Raises StoreUnavailable when the store cannot be opened."""

    def __init__(self, folder: Path, budget_bytes: int, strict: bool) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._take_lock(folder)
            self._env = lmdb.open(
                str(folder),
                map_size=max(_MAP_MINIMUM, int(budget_bytes * _MAP_FACTOR)),
                max_dbs=3,
                metasync=strict,
                sync=True,
                readahead=False,
                mode=0o600,
                max_readers=8,
            )
        except (OSError, lmdb.Error) as error:
            raise StoreUnavailable(
                f"cannot open the store in {folder}: {error}; repair or remove the folder, or choose another --store"
            ) from error
        self._env.reader_check()
        self._meta = self._env.open_db(b"meta")
        self._headers = self._env.open_db(b"headers")
        self._payloads = self._env.open_db(b"payloads")
        self._check_versions(folder)
        self._order = self._last_order()

    @staticmethod
    def _take_lock(folder: Path) -> int:
        handle = os.open(folder / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            raise StoreUnavailable(
                f"another daemon uses the store in {folder}; stop it, or choose another --store"
            ) from error
        return handle

    def _check_versions(self, folder: Path) -> None:
        mine = {b"format": FORMAT, b"lmdb": ".".join(map(str, lmdb.version()[:2])).encode()}
        with self._env.begin(write=True, db=self._meta) as txn:
            for name, value in mine.items():
                found = txn.get(name)
                if found is None:
                    txn.put(name, value)
                elif bytes(found) != value:
                    raise StoreUnavailable(
                        f"the store in {folder} has {name.decode()} version {bytes(found).decode()!r}, "
                        f"this daemon needs {value.decode()!r}; choose another --store or remove the folder"
                    )

    def _last_order(self) -> int:
        with self._env.begin(db=self._headers) as txn:
            return max((int.from_bytes(v[:_ORDER_BYTES], "big") for _, v in txn.cursor()), default=0)

    def load(self) -> Iterator[ChunkHeader]:
        entries: list[tuple[int, ChunkHeader]] = []
        broken: list[bytes] = []
        with self._env.begin() as txn:
            for key, value in txn.cursor(self._headers):
                try:
                    header = ChunkHeader.FromString(bytes(value[_ORDER_BYTES:]))
                except DecodeError:
                    broken.append(bytes(key))
                    continue
                if header.prefix_hash != bytes(key) or not self._is_sound(header):
                    broken.append(bytes(key))
                    continue
                entries.append((int.from_bytes(value[:_ORDER_BYTES], "big"), header))
        if broken:
            self.apply(WriteGroup(tuple(broken), ()))
        entries.sort(key=lambda e: e[0])
        return (header for _, header in entries)

    @staticmethod
    def _is_sound(header: ChunkHeader) -> bool:
        """The header's hash is that of its parent and tokens."""
        return keys.prefix_hash(header.parent_prefix_hash, header.token_ids) == header.prefix_hash

    def read_into(self, prefix_hash: bytes, target: memoryview) -> bool:
        with self._env.begin(db=self._payloads, buffers=True) as txn:
            found = txn.get(prefix_hash)
            if found is None or len(found) != len(target):
                return False
            target[:] = found
        return True

    def apply(self, group: WriteGroup) -> None:
        try:
            with self._env.begin(write=True) as txn:
                for key in group.remove:
                    txn.delete(key, db=self._headers)
                    txn.delete(key, db=self._payloads)
                for header, payload in group.put:
                    self._order += 1
                    entry = self._order.to_bytes(_ORDER_BYTES, "big") + header.SerializeToString()
                    txn.put(header.prefix_hash, entry, db=self._headers)
                    txn.put(header.prefix_hash, payload, db=self._payloads)
        except lmdb.Error as error:
            raise OSError(str(error)) from error

    def read_note(self, name: bytes) -> bytes | None:
        with self._env.begin(db=self._meta) as txn:
            found = txn.get(name)
        return None if found is None else bytes(found)

    def write_note(self, name: bytes, value: bytes) -> None:
        try:
            with self._env.begin(write=True, db=self._meta) as txn:
                txn.put(name, value)
        except lmdb.Error as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        self._env.sync(True)
        self._env.close()
        os.close(self._lock)
