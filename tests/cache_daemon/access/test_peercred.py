"""Who is at the other end of a Unix socket."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cache_daemon.access.peercred import (
    PeerCredentials,
    has_ended,
    is_allowed,
    open_pidfd,
    peer_credentials,
    peer_groups,
    peer_pidfd,
)

CONNECT = """
import os, socket, sys, time
if len(sys.argv) > 2:
    os.setgroups([int(g) for g in sys.argv[2:]]); os.setgid(54321); os.setuid(54322)
peer = socket.socket(socket.AF_UNIX); peer.connect(sys.argv[1]); peer.send(b"x"); time.sleep(60)
"""


@pytest.fixture
def listener(tmp_path: Path) -> socket.socket:
    tmp_path.chmod(0o755)
    for parent in list(tmp_path.parents)[:3]:
        if parent.stat().st_uid == os.getuid() and str(parent).startswith("/tmp/pytest"):
            parent.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        (tmp_path / "s").chmod(0o666)
        listening.listen()
        listening.settimeout(20)
        yield listening


def test_a_process_is_known_by_its_ids_until_it_ends(listener: socket.socket) -> None:
    with subprocess.Popen([sys.executable, "-c", CONNECT, listener.getsockname()]) as process:
        connection, _ = listener.accept()
        with connection:
            assert peer_credentials(connection) == PeerCredentials(process.pid, os.getuid(), os.getgid())
            descriptor, by_number = peer_pidfd(connection), open_pidfd(process.pid)
            assert not has_ended(descriptor)
            process.send_signal(signal.SIGSTOP)
            assert not has_ended(descriptor), "a stopped process may wake and write"
            process.kill()
            for fd in (descriptor, by_number):
                assert select.select([fd], [], [], 10)[0]
                assert has_ended(fd)
                os.close(fd)
    with pytest.raises(ProcessLookupError):
        open_pidfd(process.pid)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_another_user_is_known_as_such(listener: socket.socket) -> None:
    with subprocess.Popen([sys.executable, "-c", CONNECT, listener.getsockname(), "12345"]) as process:
        connection, _ = listener.accept()
        with connection:
            peer = peer_credentials(connection)
            assert peer == PeerCredentials(process.pid, 54322, 54321)
            assert peer_groups(connection) == {12345, 54321}
            assert not is_allowed(peer, owner=0)
            assert is_allowed(peer, owner=0, group=12345, groups=peer_groups(connection))
        process.kill()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_who_is_in_very_many_groups_counts_with_the_first(listener: socket.socket) -> None:
    groups = [str(number) for number in range(1000, 1300)]
    with subprocess.Popen([sys.executable, "-c", CONNECT, listener.getsockname(), *groups]) as process:
        connection, _ = listener.accept()
        with connection:
            assert peer_groups(connection) == {54321}
        process.kill()


def test_the_owner_and_root_are_allowed_and_members_of_a_group_if_there_is_one() -> None:
    someone = PeerCredentials(pid=5, uid=1000, gid=100)
    assert is_allowed(someone, owner=1000)
    assert is_allowed(PeerCredentials(5, 0, 0), owner=1000)
    assert not is_allowed(someone, owner=1001)
    assert not is_allowed(someone, owner=1001, groups=frozenset([7])), "groups count only for a group"
    assert is_allowed(someone, owner=1001, group=100)
    assert is_allowed(someone, owner=1001, group=7, groups=frozenset([7]))
    assert not is_allowed(someone, owner=1001, group=8, groups=frozenset([7]))


def test_a_process_of_another_namespace_has_no_number_here() -> None:
    with pytest.raises(ProcessLookupError, match="namespace"):
        open_pidfd(0)
