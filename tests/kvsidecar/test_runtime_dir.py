"""A runtime folder of somebody else: nobody says a word to what listens in it, and ``stop`` ends nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvsidecar.errors import ConfigurationError
from kvsidecar.process.runtime_dir import listener_pid, require_private_dir

from benchmarks.node import free_port

_NOBODY = 65534
_COMMANDS = {
    "status": ("status",),
    "stop": ("stop",),
    "generate": ("generate", "my secret: 4711"),
    "cache": ("cache", "stats"),
    "gateway": ("gateway", "--port"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Another user's, or where this one cannot give files away, one that others can write to."""
    found = tmp_path / "run"
    found.mkdir(mode=0o700)
    if os.getuid() == 0:
        os.chown(found, _NOBODY, _NOBODY)
    else:
        found.chmod(0o777)
    return found


@pytest.fixture
def listener(folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as found:
        found.bind(str(folder / "agent"))
        found.listen()
        found.setblocking(False)
        for name in ("worker-0.sock", "cache.sock"):
            (folder / name).symlink_to(folder / "agent")
        yield found


@pytest.mark.parametrize("command", _COMMANDS)
def test_nothing_in_another_users_runtime_folder_is_spoken_to(
    folder: Path, listener: socket.socket, command: str
) -> None:
    arguments = [*_COMMANDS[command], *([str(free_port())] if command == "gateway" else [])]
    environment = {**os.environ, "KVSIDECAR_RUNTIME_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "kvsidecar.cli.root_command", *arguments],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    assert f"the folder {folder}" in done.stderr
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give links away")
def test_another_users_link_to_a_folder_of_ones_own_is_refused(tmp_path: Path) -> None:
    own, link = tmp_path / "own", tmp_path / "link"
    own.mkdir(mode=0o700)
    link.symlink_to(own)
    require_private_dir(link)
    os.chown(link, _NOBODY, _NOBODY, follow_symlinks=False)
    with pytest.raises(ConfigurationError, match=f"belongs to user {_NOBODY}"):
        require_private_dir(link)


def test_a_link_in_place_of_a_socket_is_refused(folder: Path, listener: socket.socket) -> None:
    with pytest.raises(ConfigurationError, match="is a link and no socket"):
        listener_pid(folder / "worker-0.sock", 1.0)
    assert listener_pid(folder / "agent", 1.0) == os.getpid()
