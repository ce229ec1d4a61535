"""Runtime and data directories, and checks that only this user can access them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
from pathlib import Path

from kvsidecar.errors import ConfigurationError

_PR_SET_PDEATHSIG = 1
_CREDENTIALS = struct.Struct("3i")
_LONGEST_SOCKET_PATH = 107  # sun_path, without its terminating zero


def default_runtime_dir() -> Path:
    """Return ``$KVSIDECAR_RUNTIME_DIR``, else ``$XDG_RUNTIME_DIR/kvsidecar``, else this user's folder in ``/tmp``."""
    if chosen := os.environ.get("KVSIDECAR_RUNTIME_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "kvsidecar" if base else Path(f"/tmp/kvsidecar-{os.getuid()}")


def default_data_dir() -> Path:
    """Return ``$XDG_DATA_HOME/kvsidecar``, or ``~/.local/share/kvsidecar``."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "kvsidecar"


def ensure_private_dir(path: Path) -> Path:
    """Create a folder with mode 0700.

    Raises ConfigurationError when the folder belongs to another user, or other users can access it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot create the folder {path}: {error.strerror}") from error
    require_private_dir(path)
    return path


def require_private_dir(path: Path) -> None:
    """Check that only this user can access a folder.

    Also checks that no link of another user leads to it. A missing folder is accepted. Raises ConfigurationError.
    """
    try:
        link, found = path.lstat(), path.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(f"cannot use the folder {path}: {error.strerror}") from error
    for owner in (link.st_uid, found.st_uid):
        if owner != os.getuid():
            raise ConfigurationError(f"the folder {path} belongs to user {owner}; choose one of your own")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigurationError(f"the folder {path} is open to other users; run: chmod 700 {path}")


def own_runtime_dir() -> Path:
    """Return ``default_runtime_dir`` for clients that trust its sockets.

    Raises ConfigurationError when another user owns the folder, because any user can create it first below ``/tmp``.
    """
    found = default_runtime_dir()
    require_private_dir(found)
    return found


def listener_pid(path: Path, timeout_seconds: float) -> int | None:
    """Return the id of the process that listens at a Unix socket.

    Returns 0 for a process in another container, None if no process listens. Raises ConfigurationError for a link, and
    for a process of another user who is not root (SO_PEERCRED).
    """
    if path.is_symlink():
        raise ConfigurationError(f"{path} is a link and no socket; remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout_seconds)
        try:
            probe.connect(str(path))
        except PermissionError:
            raise ConfigurationError(f"{path} is another user's; ask as that one, or as root") from None
        except OSError:
            return None
        pid, user, _ = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user not in (os.getuid(), 0):
        raise ConfigurationError(f"user {user} listens on {path}, who is neither you nor root; nothing was sent")
    return int(pid)


def socket_target(path: Path) -> str:
    """Return the gRPC target of a Unix socket. Raises ConfigurationError when the path is too long."""
    absolute = str(path.absolute())
    if len(absolute.encode()) > _LONGEST_SOCKET_PATH:
        raise ConfigurationError(
            f"the socket path {absolute} has {len(absolute.encode())} bytes; at most {_LONGEST_SOCKET_PATH} are allowed"
        )
    return f"unix:{absolute}"


def die_with_parent(parent: int, number: int) -> None:
    """Make the kernel signal this new process when its parent ends (prctl(2)).

    ``number`` is the signal. This process exits at once if the parent has already ended. Does nothing on systems
    without prctl.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)
