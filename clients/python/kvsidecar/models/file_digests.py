"""Digests of whole files, remembered in the user's model folder until the files change."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError
from kvsidecar.models.file_state import is_settled, state_of
from kvsidecar.models.model_library import ModelLibrary
from kvsidecar.process.cpus import usable_cpus

# A digest is the hash of the pieces' hashes, which threads compute in parallel. Another size gives other digests.
_PIECE_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_MAX_THREADS = 8
_TELL_AFTER_SECONDS = 2.0
_FORGETS = "; the next start reads all weights again for their fingerprint"


def digests_of(files: list[Path], tell: Callable[[str], object]) -> list[bytes]:
    """Return a SHA-256 digest of every byte of each file; all files are in one folder.

    A file is read only if it has changed since any process of this user read it here. Processes that need the same
    folder at once wait for the first of them. If notes cannot be written, every call reads the files. ``tell`` gets a
    sentence about that, and about a long read. Raises OSError for an unreadable file.
    """
    with _announced(files, tell), ExitStack() as held:
        try:
            library = ModelLibrary()
            known = [_known(library, file) for file in files]
            if None in known:
                held.enter_context(library.locked(library.note_of(files[0].parent)))
                known = [_known(library, file) for file in files]
        except (ConfigurationError, OSError, RuntimeError) as error:  # no folder, no lock, or no home
            tell(f"{error}{_FORGETS}")
            return _read_digests(files)
        read = iter(_read_and_note(library, [f for f, digest in zip(files, known, strict=True) if not digest], tell))
        return [digest or next(read) for digest in known]


def _known(library: ModelLibrary, file: Path) -> bytes | None:
    note = library.read_note(file)
    digest = str(note.pop("digest", ""))
    return bytes.fromhex(digest) if note == state_of(file) and re.fullmatch("[0-9a-f]{64}", digest) else None


def _read_and_note(library: ModelLibrary, files: list[Path], tell: Callable[[str], object]) -> list[bytes]:
    """Return the digests of files, and note those of files that did not change shortly before or meanwhile."""
    states, began_ns = [state_of(file) for file in files], time.time_ns()
    digests = _read_digests(files)
    try:
        for file, state, digest in zip(files, states, digests, strict=True):
            if is_settled(file, state, began_ns):
                library.write_note(file, state | {"digest": digest.hex()})
    except ConfigurationError as error:
        tell(f"{error}{_FORGETS}")
    return digests


def _read_digests(files: list[Path]) -> list[bytes]:
    pieces = [(file, begin) for file in files for begin in range(0, file.stat().st_size, _PIECE_BYTES)]
    digests = {file: hashlib.sha256() for file in files}
    with ThreadPoolExecutor(min(usable_cpus(), _MAX_THREADS), "file-digests") as pool:
        for (file, _), digest in zip(pieces, pool.map(_piece_digest, pieces), strict=True):
            digests[file].update(digest)
    return [digests[file].digest() for file in files]


def _piece_digest(piece: tuple[Path, int]) -> bytes:
    file, begin = piece
    digest, buffer, left = hashlib.sha256(), memoryview(bytearray(_READ_BYTES)), _PIECE_BYTES
    with file.open("rb", buffering=0) as data:
        data.seek(begin)
        while left and (count := data.readinto(buffer[: min(left, _READ_BYTES)])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()


@contextmanager
def _announced(files: list[Path], tell: Callable[[str], object]) -> Iterator[None]:
    """Tell about the block if it takes long."""
    size = format_size(sum(file.stat().st_size for file in files))
    text = f"hashing {size} of weights in {files[0].parent}, or waiting for a process that does; this is done once"
    timer = threading.Timer(_TELL_AFTER_SECONDS, tell, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
