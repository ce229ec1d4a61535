"""Who is at the other end of a Unix socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cache_daemon.auth.authenticator import PeerCredentials, is_allowed, peer_credentials

CONNECT = """
import os, socket, sys, time
os.setgroups([]); os.setgid(54321); os.setuid(54322)
peer = socket.socket(socket.AF_UNIX); peer.connect(sys.argv[1]); peer.send(b"x"); time.sleep(60)
"""


@pytest.fixture
def listener(tmp_path: Path) -> socket.socket:
    tmp_path.chmod(0o755)
    shared = Path(tempfile.gettempdir())
    for parent in tmp_path.parents:
        if parent != shared and parent.is_relative_to(shared):
            parent.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        (tmp_path / "s").chmod(0o666)
        listening.listen()
        listening.settimeout(20)
        yield listening


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_another_user_is_known_as_such(listener: socket.socket) -> None:
    with subprocess.Popen([sys.executable, "-c", CONNECT, listener.getsockname()]) as process:
        connection, _ = listener.accept()
        with connection:
            peer = peer_credentials(connection)
            assert peer == PeerCredentials(process.pid, 54322, 54321)
            assert not is_allowed(peer, owner=0)
        process.kill()


def test_the_owner_and_root_are_allowed() -> None:
    someone = PeerCredentials(pid=5, uid=1000, gid=100)
    assert is_allowed(someone, owner=1000)
    assert is_allowed(PeerCredentials(5, 0, 0), owner=1000)
    assert not is_allowed(someone, owner=1001)
