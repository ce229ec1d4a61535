"""Offline verification of a store that no daemon holds: every page, record and payload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvsidecar.errors import StoreUnavailable

from cache_daemon.durable.durable_tier import NoRoom, TierFailed
from cache_daemon.durable.encryption import seal_of
from cache_daemon.durable.lmdb_file import Damage, PageFile
from cache_daemon.durable.rebuild import check_key, other_version, payload_is_sound, rebuild
from cache_daemon.durable.record_format import Unsound, open_header
from cache_daemon.durable.store_dir import StoreFolder
from cache_daemon.durable.survey import OtherVersion, lenient_survey, strict_survey
from cache_daemon.durable.tier_contents import contents_of

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Scrubbed:
    """What a scrub found. ``problems`` are damaged pages; ``repaired`` says that all of it is gone now."""

    sound: int
    corrupt: int
    orphaned: int
    corrupt_notes: int
    problems: tuple[str, ...]
    repaired: bool

    @property
    def is_clean(self) -> bool:
        return not (self.corrupt or self.orphaned or self.corrupt_notes or self.problems)


def scrub(folder: Path, repair: bool, key: bytes | None = None, progress: Progress | None = None) -> Scrubbed:
    """Reads everything in a store; with ``repair``, what is not sound is removed, and a damaged file set aside.

    ``progress`` hears chunks done and chunks in all. Raises StoreUnavailable when the store is in use, of another
    version, encrypted with another key, or cannot be read or rewritten; ConfigurationError for an impossible key.
    """
    seal = seal_of(key)
    held = StoreFolder(folder, create=False)
    try:
        file = PageFile(held.data)
        try:
            survey = strict_survey(file)
        except Damage as damage:
            survey = lenient_survey(file)
            if str(damage) not in survey.problems:
                survey.problems.insert(0, str(damage))
        check_key(folder, survey, seal)
        corrupt = set(survey.broken_headers)
        for done, name in enumerate(survey.records):
            if progress is not None:
                progress(done, len(survey.records))
            try:
                open_header(seal, name, survey.records[name])
            except Unsound:
                corrupt.add(name)
                continue
            if not payload_is_sound(survey, name):
                corrupt.add(name)
        if progress is not None:
            progress(len(survey.records), len(survey.records))
        for name in corrupt:
            survey.places.pop(name, None)
        contents = contents_of(survey, seal)
        found = Scrubbed(
            len(contents.headers), len(corrupt), contents.report.orphaned, contents.report.notes,
            tuple(survey.problems), repair,
        )  # fmt: skip
        if repair and not found.is_clean:
            rebuild(held, survey, seal, keep_damaged=bool(survey.problems))
        return found
    except OtherVersion as error:
        raise other_version(folder, error) from error
    except (OSError, NoRoom, TierFailed) as error:
        raise StoreUnavailable(f"cannot verify the store in {folder}: {error}") from error
    finally:
        held.release()
