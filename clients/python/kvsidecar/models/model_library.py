"""The user's models on disk: pulled models, and conversions of GGUF files.

``pulled/NAME`` has the downloaded files and ``entry.json``. ``converted/NAME-SHA-DTYPE`` is a folder in transformers'
format, for faster starts; its ``source.json`` describes the original file. Folders are created atomically: a process
builds a folder beside the target under a lock, flushes it, and renames it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError, UnknownModel
from kvsidecar.models.file_state import is_settled, state_of
from kvsidecar.models.gguf_parts import part_paths
from kvsidecar.process.runtime_dir import default_data_dir

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
_SPARE_BYTES = 256 << 20  # left free on the disk
ENTRY, SOURCE = "entry.json", "source.json"
BUILT_IN = "demo"
# Prefixes of names beside a folder: its lock, the folder that is built for it, and the folder that is being removed.
_LOCK, _PARTIAL, _GONE = ".lock-", ".partial-", ".gone-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?(:[A-Za-z0-9_]+)?")


@dataclass(frozen=True)
class ModelEntry:
    """A pulled model's entry, stored beside its files."""

    name: str  # the value for --model
    source: str  # its origin, for people
    architecture: str
    licence: str
    file: str = ""  # the GGUF file in the folder; empty for a folder of safetensors


@dataclass(frozen=True)
class GgufRecord:
    """Record of a GGUF file that was read before; valid while the states of all its parts are unchanged."""

    parts: list[dict[str, int]]
    sha256: str
    dtype: str  # dtype of its weights, or of their conversion
    coded: bool  # True if the CPU kernel can multiply the codes of some quantized weights


@dataclass(frozen=True)
class ModelListing:
    """One line of ``kvsidecar models``."""

    name: str
    size_bytes: int
    architecture: str
    source: str
    where: str


class ModelLibrary:
    """A folder of models. Safe for concurrent use by several processes."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or default_data_dir() / "models"

    # ---- contents ------------------------------------------------------------------------------------------

    def folder_of(self, name: str) -> Path:
        """Return the folder of a pulled model, existing or not. Raises UnknownModel for an invalid name."""
        if not _NAME.fullmatch(name):
            raise UnknownModel(f"{name!r} is not a name of a model; allowed are letters, digits, . _ -, and ORG/NAME")
        return self.root / "pulled" / name.replace("/", "--").replace(":", "@")

    def find(self, name: str) -> Path | None:
        """Return the GGUF file or folder of a pulled model, or None."""
        if not _NAME.fullmatch(name):
            return None
        folder = self.folder_of(name)
        entry = _read_entry(folder)
        return None if entry is None else folder / entry.file

    def entries(self) -> list[tuple[ModelEntry, Path]]:
        """Return the pulled models and their folders, sorted by name."""
        found = [(_read_entry(folder), folder) for folder in _folders(self.root / "pulled")]
        return sorted(((e, f) for e, f in found if e is not None), key=lambda pair: pair[0].name)

    def listed(self) -> list[ModelListing]:
        """List pulled models, then conversions of files outside the library."""
        conversions = [(_read_json(f / SOURCE), f) for f in _folders(self.root / "converted")]
        out = []
        for entry, folder in self.entries():
            mine = [f for source, f in conversions if _made_of(source, folder)]
            size = sum(map(size_of, [folder, *mine]))
            out.append(ModelListing(entry.name, size, entry.architecture, entry.source, str(folder)))
        for source, folder in conversions:
            path = Path(source.get("path", ""))
            if not any(_made_of(source, folder_) for _, folder_ in self.entries()):
                kind = ", ".join(_read_json(folder / "config.json").get("architectures", []))
                out.append(ModelListing(folder.name, size_of(folder), kind, f"written out of {path}", str(folder)))
        return out

    def remove(self, name: str) -> int:
        """Remove a pulled model with its conversions, or one conversion; ``name`` is a name in ``listed``.

        Returns the freed bytes. Raises UnknownModel.
        """
        known = {one.name: one for one in self.listed()}
        if name not in known:
            raise UnknownModel(f"there is no model {name!r} to remove; there are {', '.join(known) or 'none'}")
        self._discard_all(Path(known[name].where))
        return known[name].size_bytes

    def _discard_all(self, folder: Path) -> None:
        """Remove a folder; before that, remove its conversions recursively."""
        for made in _folders(self.root / "converted"):
            if _made_of(_read_json(made / SOURCE), folder):
                self._discard_all(made)
        self._discard(folder)

    def discard(self, folder: Path, inode: int) -> None:
        """Remove a corrupt folder, identified by ``inode``, unless it was replaced meanwhile."""
        self._discard(folder, inode)

    def _discard(self, folder: Path, inode: int | None = None) -> None:
        # Rename first, so that no process sees a partly deleted folder.
        with self.locked(folder):
            # Another process may have removed it meanwhile, or put another one there.
            if not folder.is_dir() or (inode is not None and folder.stat().st_ino != inode):
                return
            gone = folder.with_name(f"{_GONE}{folder.name}")
            shutil.rmtree(gone, ignore_errors=True)
            folder.rename(gone)
            shutil.rmtree(gone)

    # ---- putting models there -------------------------------------------------------------------------------

    @contextmanager
    def building(self, target: Path) -> Iterator[Path | None]:
        """Yield an empty folder that becomes ``target`` if the block succeeds.

        If the block fails, the folder is removed. Yields None when ``target`` exists. Other processes that build the
        same target wait. Also removes what killed processes left beside it. Raises ConfigurationError when the disk is
        full or read-only.
        """
        with self.locked(target):
            if target.is_dir():
                yield None
                return
            _remove_abandoned(target)
            partial = target.with_name(f"{_PARTIAL}{target.name}")
            with atomic_folder(target, partial):
                yield partial

    @contextmanager
    def locked(self, target: Path) -> Iterator[None]:
        """Exclude other processes that lock the same path. Raises ConfigurationError when the folder is read-only."""
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            handle = target.with_name(f"{_LOCK}{target.name}").open("w")
        except OSError as error:
            raise ConfigurationError(f"cannot write to {target.parent}: {error.strerror}") from error
        with handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    # ---- files that were read before ------------------------------------------------------------------------

    def known(self, file: Path) -> GgufRecord | None:
        """Return the record of a file with all its parts, if they are unchanged."""
        try:
            known = GgufRecord(**self.read_note(file))
            return known if known.parts == [state_of(part) for part in part_paths(file)] else None
        except (TypeError, OSError):  # the record has another version, or a part is missing
            return None

    def remember(self, file: Path, dtype: str, coded: bool) -> GgufRecord:
        """Compute a file's checksum, and store its record unless the file changed just before or meanwhile.

        The checksum of several parts covers their checksums.
        """
        parts, began_ns = part_paths(file), time.time_ns()
        states = [state_of(part) for part in parts]
        sums = [sha256_of(part) for part in parts]
        whole = sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()
        known = GgufRecord(states, whole, dtype, coded)
        if all(is_settled(part, state, began_ns) for part, state in zip(parts, states, strict=True)):
            self.write_note(file, asdict(known))
        return known

    def read_note(self, file: Path) -> dict[str, Any]:
        """Return the note about a file; empty if there is none, or if it is corrupt."""
        return _read_json(self.note_of(file))

    def write_note(self, file: Path, note: dict[str, Any]) -> None:
        """Replace the note about a file. Raises ConfigurationError when the disk is full or read-only."""
        target = self.note_of(file)
        fresh = target.with_suffix(f".{os.getpid()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(note), encoding="utf-8")
            fresh.replace(target)
        except OSError as error:
            raise ConfigurationError(f"cannot write to {target.parent}: {error.strerror}") from error

    def note_of(self, file: Path) -> Path:
        """Return the path of the note about a file or folder."""
        return self.root / "known" / f"{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]}.json"


def check_disk_space(what: str, size_bytes: int, folder: Path, otherwise: str = "") -> None:
    """Raise ConfigurationError when a folder's disk has less than ``size_bytes`` free."""
    free = shutil.disk_usage(folder).free
    if free < size_bytes + _SPARE_BYTES:
        raise ConfigurationError(
            f"{what} takes {format_size(size_bytes)}, and {folder} has {format_size(free)} left{otherwise}"
        )


@contextmanager
def atomic_folder(target: Path, partial: Path) -> Iterator[None]:
    """Create the folder ``partial``, which becomes ``target`` if the block succeeds.

    The folder is flushed before it becomes ``target``, and removed if the block fails. Raises ConfigurationError when
    the disk is full or read-only.
    """
    try:
        partial.mkdir()
        yield
        _flush(partial)
        partial.rename(target)
        _flush_folder(target.parent)
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        raise ConfigurationError(f"cannot write to {target.parent}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_entry(folder: Path, entry: ModelEntry) -> None:
    (folder / ENTRY).write_text(json.dumps(asdict(entry), indent=1) + "\n", encoding="utf-8")


def sha256_of(file: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def size_of(folder: Path) -> int:
    """Return the total bytes of all files below a folder."""
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def _remove_abandoned(target: Path) -> None:
    """Remove unfinished and half removed folders of ``target``, which the caller has locked, and of others beside it.

    Keeps those that a live process has locked.
    """
    for lock in target.parent.glob(f"{_LOCK}*"):
        name = lock.name.removeprefix(_LOCK)
        found = [path for kind in (_PARTIAL, _GONE) if (path := target.with_name(f"{kind}{name}")).is_dir()]
        if not found:
            continue
        with ExitStack() as held:
            if name != target.name:
                try:
                    fcntl.flock(held.enter_context(lock.open("w")), fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:  # a live process has the lock, or another user owns it
                    continue
            for folder in found:
                shutil.rmtree(folder, ignore_errors=True)


def _made_of(source: dict[str, Any], folder: Path) -> bool:
    """Return whether a conversion's source file is in this folder or below it."""
    return Path(source.get("path", "")).is_relative_to(folder.resolve())


def _folders(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return sorted(f for f in parent.iterdir() if f.is_dir() and not f.name.startswith("."))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_entry(folder: Path) -> ModelEntry | None:
    try:
        return ModelEntry(**_read_json(folder / ENTRY))
    except TypeError:
        return None


def _flush(folder: Path) -> None:
    """Flush a folder's files to disk, so that the rename cannot become durable before them."""
    for file in [f for f in folder.rglob("*") if f.is_file()]:
        with file.open("rb") as data:
            os.fsync(data.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
