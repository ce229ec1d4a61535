"""LMDB environment of the durable tier, for writing only.

Reads bypass LMDB (``payload_reader``), so there are no LMDB readers, no reader table and no lock file: one process owns
the folder, and one thread at a time has a transaction. LMDB reads the map only to look up keys for writing, never for
payloads.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from cache_daemon.durable.durable_tier import OutOfSpace, TierFailed
from cache_daemon.durable.encryption import Cipher
from cache_daemon.durable.lmdb_file import LmdbCorruption
from cache_daemon.durable.record_format import DATABASES, FORMAT, META, checked

# LMDB reports a short write as EIO. A full disk causes short writes, too.
_SHORT_WRITE = os.strerror(errno.EIO)
_CORRUPTED = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError)


class ShortWrite(TierFailed):
    """The system wrote fewer bytes than requested: the disk failed, or is full."""


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate LMDB's errors to OutOfSpace, ShortWrite, TierFailed or LmdbCorruption."""
    try:
        yield
    except (lmdb.MapFullError, lmdb.DiskError) as error:
        raise OutOfSpace(f"the store is full: {error}") from error
    except _CORRUPTED as error:
        raise LmdbCorruption(str(error)) from error
    except lmdb.Error as error:
        if str(error).endswith(_SHORT_WRITE):
            raise ShortWrite(f"the store cannot be written: {error}") from error
        raise TierFailed(f"the store cannot be written: {error}") from error
    except OSError as error:
        raise TierFailed(f"the store cannot be written: {error}") from error


class LmdbEnvironment:
    """An LMDB environment with the store's databases. Raises as ``translate_errors`` says."""

    def __init__(self, folder: Path, map_bytes: int, metasync: bool = False, sync: bool = True) -> None:
        # py-lmdb 3 bundles two LMDB versions; LMDB 1.0 writes another data format.
        options: dict[str, Any] = {"lib_version": 0} if int(lmdb.__version__.split(".")[0]) >= 3 else {}
        with translate_errors():
            self._env: Any = lmdb.open(
                str(folder),
                map_size=map_bytes,
                max_dbs=len(DATABASES),
                metasync=metasync,
                sync=sync,
                readahead=False,
                lock=False,
                mode=0o600,
                **options,
            )
        self.map_bytes = map_bytes
        self.databases: dict[bytes, Any] = {}
        try:
            with translate_errors(), self._env.begin(write=True) as txn:
                for name in DATABASES:
                    self.databases[name] = self._env.open_db(name, txn=txn)
        except BaseException:
            self._env.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Open a write transaction, committed at the end unless the body raises."""
        with translate_errors(), self._env.begin(write=True) as txn:
            changing = Transaction(txn, self.databases)
            yield changing
            changing.put(META, b"commit", checked(META, b"commit", txn.id().to_bytes(8, "little")))

    def initialise(self, cipher: Cipher) -> None:
        """Write the format version and the check value of the key."""
        with self.transaction() as txn:
            txn.put(META, b"format", checked(META, b"format", FORMAT))
            txn.put(META, b"key", checked(META, b"key", cipher.new_key_check()))

    def resize(self, map_bytes: int) -> None:
        """Resize the map, never below its used size. No transaction may be open."""
        with translate_errors():
            self._env.set_mapsize(map_bytes)
        self.map_bytes = map_bytes

    def sync(self) -> None:
        with translate_errors():
            self._env.sync(True)

    def close(self) -> None:
        self._env.close()


class Transaction:
    """Changes of one transaction."""

    def __init__(self, txn: Any, databases: dict[bytes, Any]) -> None:
        self._txn, self._databases = txn, databases

    def put(self, database: bytes, key: bytes, value: bytes | memoryview) -> None:
        self._txn.put(key, value, db=self._databases[database])

    def delete(self, database: bytes, key: bytes) -> None:
        self._txn.delete(key, db=self._databases[database])
