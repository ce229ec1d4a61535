"""Store folder: its lock, its data file, and the replacement of the data file.

``data.mdb`` is the store. The daemon that uses it locks ``daemon.lock``. ``data.mdb.rebuild/`` holds an incomplete new
data file, ``data.mdb.damaged-N`` is the last file that had to be replaced, and ``data.mdb.format-N`` a store of a
release with another format. A folder may also hold files of other programs: the store removes only files of these
names.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvsidecar.errors import StoreUnavailable

# Errors of a file system without hard links, such as exFAT and some network file systems.
_NO_LINKS = frozenset((errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK))
_REBUILD = "data.mdb.rebuild"
_DAMAGED = "data.mdb.damaged-"
_FORMAT = "data.mdb.format-"


class StoreDir:
    """A store's folder, locked for this process. Raises StoreUnavailable."""

    def __init__(self, path: Path, create: bool = True) -> None:
        self.path = path
        self.data = path / "data.mdb"
        self.rebuild = path / _REBUILD
        try:
            if create:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreUnavailable(
                f"cannot open the store in {path}: {error}; repair or remove the folder, or choose another --store"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            if isinstance(error, BlockingIOError):
                text = f"another daemon uses the store in {path}; stop it, or choose another --store"
            else:
                text = f"cannot open the store in {path}: {error}; choose another --store"
            raise StoreUnavailable(text) from error
        shutil.rmtree(self.rebuild, ignore_errors=True)

    @property
    def has_data(self) -> bool:
        """True when there is a data file that is not empty."""
        return self.data.exists() and self.data.stat().st_size > 0

    def keep_damaged(self) -> Path:
        """Give the data file a second name, replacing an earlier damaged one.

        Copies the file if the file system has no hard links. Raises OSError.
        """
        earlier, kept = self._damaged()
        try:
            os.link(self.data, kept)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _copy(self.data, kept)
        for old in earlier:
            old.unlink()
        return kept

    def set_aside(self) -> Path:
        """Rename the data file, replacing an earlier damaged one. Raises OSError."""
        earlier, kept = self._damaged()
        os.rename(self.data, kept)
        self._sync()
        for old in earlier:
            old.unlink()
        return kept

    def set_aside_format(self, name: str) -> Path:
        """Rename the data file of another format, replacing an earlier file of that format. Raises OSError."""
        kept = self.path / f"{_FORMAT}{name}"
        os.rename(self.data, kept)
        self._sync()
        return kept

    def _damaged(self) -> tuple[list[Path], Path]:
        """Return the damaged files that were kept, and a name for the next one."""
        earlier = sorted(self.path.glob(f"{_DAMAGED}*"), key=_number)
        return earlier, self.path / f"{_DAMAGED}{_number(earlier[-1]) + 1 if earlier else 1}"

    @contextmanager
    def new_data_folder(self) -> Iterator[Path]:
        """Create an empty folder for a new data file, and remove it at the end. Raises OSError.

        ``install_rebuilt`` takes the complete file out of it.
        """
        shutil.rmtree(self.rebuild, ignore_errors=True)
        self.rebuild.mkdir(mode=0o700)
        try:
            yield self.rebuild
        finally:
            shutil.rmtree(self.rebuild, ignore_errors=True)

    def install_rebuilt(self) -> None:
        """Make the complete file in ``data.mdb.rebuild/`` the data file, in one step. Raises OSError."""
        os.rename(self.rebuild / "data.mdb", self.data)
        self._sync()

    def _sync(self) -> None:
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def release(self) -> None:
        os.close(self._lock)


def _copy(source: Path, target: Path) -> None:
    """Copy a file on a file system without hard links. Raises OSError and leaves no partial file."""
    try:
        shutil.copyfile(source, target)
        target.chmod(0o600)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _number(path: Path) -> int:
    text = path.name.removeprefix(_DAMAGED)
    return int(text) if text.isdigit() else 0
