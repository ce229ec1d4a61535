"""Recovery: opens a store's data file, and repairs it when it is corrupt.

Only ``pread`` reads a data file until it was scanned, so corruption in it cannot end the process. LMDB opens a data
file only after it was scanned or rebuilt.
"""

from __future__ import annotations

from pathlib import Path

import structlog
from kvsidecar.errors import StoreUnavailable

from cache_daemon.durable.compaction import rebuild
from cache_daemon.durable.durable_tier import PAGE_BYTES, OutOfSpace, TierFailed
from cache_daemon.durable.encryption import Cipher
from cache_daemon.durable.lmdb_env import LmdbEnvironment
from cache_daemon.durable.lmdb_file import LmdbCorruption, PageFile, leaf_nodes
from cache_daemon.durable.record_format import (
    DATABASES,
    FORMAT,
    HEADERS,
    CorruptRecord,
    decrypt_header,
    verified,
)
from cache_daemon.durable.store_dir import StoreDir
from cache_daemon.durable.store_scan import LMDB_MAGIC, StoreScan, UnsupportedVersion, lenient_scan, strict_scan

log = structlog.get_logger("cache_daemon")
_NEW_MAP_BYTES = 1 << 20
_SEARCHED_PAGES = 16_384


def open_data(
    folder: StoreDir, cipher: Cipher, *, rewrite: bool = False, replace_other_formats: bool = False
) -> StoreScan:
    """Return the scan of an intact data file, after repair if necessary.

    ``rewrite`` rebuilds it even if its pages look intact, or if some cannot be read. ``replace_other_formats`` renames
    a store of another format and creates an empty store. Raises StoreUnavailable, OSError, and LmdbCorruption if
    nothing can be read.
    """
    if not folder.has_data:
        create(folder, cipher)
    try:
        try:
            if rewrite:
                raise LmdbCorruption("LMDB found damage, or the disk cannot read a page")
            scan = strict_scan(PageFile(folder.data))
        except LmdbCorruption as corruption:
            return _repair(folder, cipher, str(corruption))
        if not scan.format:
            create(folder, cipher)
            return strict_scan(PageFile(folder.data))
        check_key(folder.path, scan, cipher)
        return scan
    except UnsupportedVersion as error:
        if not (replace_other_formats and error.format):
            raise other_version(folder.path, error) from error
        kept = folder.set_aside_format(error.format)
        log.warning(
            "the store is of a release with another format; it is kept aside, and an empty one begins",
            format=error.format, needed=FORMAT.decode(), kept_as=str(kept),
        )  # fmt: skip
        create(folder, cipher)
        return strict_scan(PageFile(folder.data))


def create(folder: StoreDir, cipher: Cipher) -> None:
    """Create an empty store in place of the data file. Raises StoreUnavailable."""
    try:
        with folder.new_data_folder() as new:
            environment = LmdbEnvironment(new, _NEW_MAP_BYTES)
            try:
                environment.initialise(cipher)
                environment.sync()
            finally:
                environment.close()
            folder.install_rebuilt()
    except (OSError, OutOfSpace, TierFailed) as error:
        raise StoreUnavailable(
            f"cannot open the store in {folder.path}: {error}; free some room, or choose another --store"
        ) from error


def _repair(folder: StoreDir, cipher: Cipher, reason: str) -> StoreScan:
    """Rebuild a corrupt file, without what the disk cannot read.

    Without enough disk space, set the whole corrupt file aside and start with an empty store.
    """
    file = PageFile(folder.data, skip_unreadable=True)
    scan = lenient_scan(file)
    check_is_ours(folder.path, file, scan, reason)
    check_key(folder.path, scan, cipher)
    try:
        saved = rebuild(folder, scan, cipher, keep_damaged=True)
    except (OSError, OutOfSpace, TierFailed) as error:
        kept = folder.set_aside()
        create(folder, cipher)
        log.error(
            "the store was damaged and could not be repaired; beginning with an empty one",
            reason=reason, error=str(error), kept_as=str(kept),
        )  # fmt: skip
    else:
        log.warning(
            "the store was damaged and has been repaired",
            reason=reason, problems=saved.problems, chunks=saved.chunks, notes=saved.notes, lost=dict(saved.lost),
            kept_as=str(saved.kept_as),
        )  # fmt: skip
    return strict_scan(PageFile(folder.data))


def check_is_ours(folder: Path, file: PageFile, scan: StoreScan, reason: str) -> None:
    """Raise StoreUnavailable when a corrupt data file is another program's; ``reason`` names the corruption."""
    if not scan.format and not scan.records and not _looks_like_ours(file):
        raise StoreUnavailable(
            f"cannot open the store in {folder}: data.mdb is no store of this program ({reason}); "
            "repair or remove the folder, or choose another --store"
        )


def _looks_like_ours(file: PageFile) -> bool:
    """Return True for a file with LMDB's magic number, a record of this program, or only zeros."""
    head = file.read(0, min(2 * PAGE_BYTES, file.size_bytes))
    if LMDB_MAGIC in head:
        return True
    empty = not any(head)
    for number in range(min(_SEARCHED_PAGES, file.size_bytes // PAGE_BYTES)):
        try:
            page = file.page(number)
            empty = empty and not any(page)
            nodes = leaf_nodes(page, number)
        except LmdbCorruption:
            continue
        for node in nodes:
            if node.key in DATABASES and node.is_database:
                return True
            try:
                verified(HEADERS, node.key, node.value or b"")
            except CorruptRecord:
                continue
            return True
    return empty


def check_key(folder: Path, scan: StoreScan, cipher: Cipher) -> None:
    """Raise StoreUnavailable when the store has another key, or is not encrypted although a key is given.

    If damage hides the record of the key, one header that the key decrypts is enough.
    """
    check = scan.key_check
    is_right = cipher.matches(check) if check else not scan.records or _opens_any(scan, cipher)
    if is_right:
        return
    if not check:
        text = (
            "is damaged and cannot be read with the key given, or without one; "
            "give its key, choose another --store, or remove the folder"
        )
    elif check == b"none":
        text = "is not encrypted, but a key is given; start without the key, or choose another --store"
    elif not cipher.max_overhead:
        text = "is encrypted; give its key, choose another --store, or remove the folder"
    else:
        text = "is encrypted with another key; give that key, choose another --store, or remove the folder"
    raise StoreUnavailable(f"the store in {folder} {text}")


def _opens_any(scan: StoreScan, cipher: Cipher) -> bool:
    for key, record in scan.records.items():
        try:
            decrypt_header(cipher, key, record)
        except CorruptRecord:
            continue
        return True
    return False


def other_version(folder: Path, error: UnsupportedVersion) -> StoreUnavailable:
    return StoreUnavailable(
        f"the store in {folder} {error}, this release needs version {FORMAT.decode()!r}; "
        "remove the folder or choose another --store"
    )
