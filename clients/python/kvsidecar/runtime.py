"""Where sockets and shared memory lie, and that nobody else can reach them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from pathlib import Path

from kvsidecar.errors import ConfigurationError

_PR_SET_PDEATHSIG = 1
_LONGEST_SOCKET_PATH = 107  # sun_path, without its terminating zero


def default_runtime_dir() -> Path:
    """``$KVSIDECAR_RUNTIME_DIR``, as ``serve`` takes it; else ``$XDG_RUNTIME_DIR/kvsidecar``, or a folder of this user
    under ``/tmp``."""
    if chosen := os.environ.get("KVSIDECAR_RUNTIME_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "kvsidecar" if base else Path(f"/tmp/kvsidecar-{os.getuid()}")


def default_data_dir() -> Path:
    """``$XDG_DATA_HOME/kvsidecar``, or ``~/.local/share/kvsidecar``."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "kvsidecar"


def ensure_private_dir(path: Path) -> Path:
    """Creates a folder with mode 0700. Raises ConfigurationError when it belongs to somebody else or is open."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot create the folder {path}: {error.strerror}") from error
    found = path.stat()
    if found.st_uid != os.getuid():
        raise ConfigurationError(f"the folder {path} belongs to user {found.st_uid}; choose one of your own")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigurationError(f"the folder {path} is open to other users; run: chmod 700 {path}")
    return path


def socket_target(path: Path) -> str:
    """The gRPC target of a Unix socket. Raises ConfigurationError when the path is too long for one."""
    absolute = str(path.absolute())
    if len(absolute.encode()) > _LONGEST_SOCKET_PATH:
        raise ConfigurationError(
            f"the socket path {absolute} has {len(absolute.encode())} bytes; at most {_LONGEST_SOCKET_PATH} are allowed"
        )
    return f"unix:{absolute}"


def end_with_parent(parent: int, number: int) -> None:
    """In a new process: has the kernel send it signal ``number`` when its parent, of that id, ends (prctl(2)).

    Where the parent has ended already, so does this process. Does nothing where there is no such call.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)
