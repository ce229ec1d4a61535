"""Node lock: a file lock that allows one node per runtime folder."""

from __future__ import annotations

import fcntl
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from kvsidecar.errors import ConfigurationError
from kvsidecar.process.node_report import LOCK, NodeReport, write_node_report
from kvsidecar.process.runtime_dir import ensure_private_dir


class NodeLock:
    """Context manager of a locked file in the runtime folder.

    The file contains a description of the node. The kernel releases the lock when the process ends; the file stays.
    Raises ConfigurationError if another node runs in the folder, or if the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / LOCK
        self._file: TextIO | None = None
        self._node: NodeReport | None = None

    def __enter__(self) -> Self:
        self._file = self._acquire()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def describe(self, node: NodeReport) -> None:
        """Write the description that ``status`` and ``stop`` read. Raises ConfigurationError."""
        assert self._file is not None
        self._node = node
        self._write(self._file, node)

    def restore(self) -> bool:
        """Recreate folder and file if they were deleted; True if it recreated any. Raises ConfigurationError."""
        if self._path.exists():
            return False
        gone, self._file = self._file, self._acquire()
        if gone is not None:
            gone.close()
        if self._node is not None:
            self._write(self._file, self._node)
        return True

    def _write(self, file: TextIO, node: NodeReport) -> None:
        try:
            write_node_report(file, node)
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"cannot write to {self._path}: {error.strerror}; free space in its file system, or choose another "
            "--runtime-dir"
        )

    def _acquire(self) -> TextIO:
        ensure_private_dir(self._folder)
        try:
            file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ConfigurationError(
                f"another kvsidecar serve runs in {self._folder}; stop it, or give this node its own --runtime-dir, "
                "--store and --port"
            ) from None
        return file
