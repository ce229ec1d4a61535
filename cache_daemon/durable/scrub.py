"""Scrub: offline verification of every page, record and payload of a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvsidecar.errors import StoreUnavailable

from cache_daemon.durable.compaction import payload_is_intact, rebuild
from cache_daemon.durable.durable_tier import OutOfSpace, TierFailed
from cache_daemon.durable.encryption import cipher_for
from cache_daemon.durable.lmdb_file import LmdbCorruption, PageFile
from cache_daemon.durable.record_format import CorruptRecord, decrypt_header
from cache_daemon.durable.recovery import check_is_ours, check_key, other_version
from cache_daemon.durable.store_dir import StoreDir
from cache_daemon.durable.store_scan import UnsupportedVersion, lenient_scan, strict_scan
from cache_daemon.durable.tier_contents import read_contents

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ScrubReport:
    """Result of a scrub.

    ``problems`` are corrupt pages; ``repaired`` is True when everything corrupt was removed.
    """

    sound: int
    corrupt: int
    orphaned: int
    corrupt_notes: int
    problems: tuple[str, ...]
    repaired: bool

    @property
    def is_clean(self) -> bool:
        return not (self.corrupt or self.orphaned or self.corrupt_notes or self.problems)


def scrub(folder: Path, repair: bool, key: bytes | None = None, progress: Progress | None = None) -> ScrubReport:
    """Verify a store; with ``repair``, remove corrupt records and set a corrupt file aside.

    ``progress`` gets the number of verified chunks and the total. Raises StoreUnavailable when the store is in use, of
    another version or another program, encrypted with another key, or cannot be read or rewritten. Raises
    ConfigurationError for an impossible key.
    """
    cipher = cipher_for(key)
    held = StoreDir(folder, create=False)
    try:
        file = PageFile(held.data, skip_unreadable=True)
        try:
            scan = strict_scan(file)
        except LmdbCorruption as corruption:
            scan = lenient_scan(file)
            check_is_ours(folder, file, scan, str(corruption))
            if str(corruption) not in scan.problems:
                scan.problems.insert(0, str(corruption))
        check_key(folder, scan, cipher)
        corrupt = set(scan.broken_headers)
        for done, name in enumerate(scan.records):
            if progress is not None:
                progress(done, len(scan.records))
            try:
                decrypt_header(cipher, name, scan.records[name])
            except CorruptRecord:
                corrupt.add(name)
                continue
            if not payload_is_intact(scan, name):
                corrupt.add(name)
        if progress is not None:
            progress(len(scan.records), len(scan.records))
        for name in corrupt:
            scan.places.pop(name, None)
        contents = read_contents(scan, cipher)
        found = ScrubReport(
            len(contents.headers), len(corrupt), contents.report.orphaned, contents.report.notes,
            tuple(scan.problems), repair,
        )  # fmt: skip
        if repair and not found.is_clean:
            rebuild(held, scan, cipher, keep_damaged=bool(scan.problems))
        return found
    except UnsupportedVersion as error:
        raise other_version(folder, error) from error
    except (OSError, OutOfSpace, TierFailed) as error:
        raise StoreUnavailable(f"cannot verify the store in {folder}: {error}") from error
    finally:
        held.release()
