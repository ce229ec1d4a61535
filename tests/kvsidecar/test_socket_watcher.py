"""Sockets whose path somebody deletes: served again, and another's at the path left alone."""

from __future__ import annotations

import asyncio
import gc
import shutil
import socket
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvsidecar.net import grpc_server, socket_watcher
from kvsidecar.net.channel import aio_channel
from kvsidecar.net.grpc_server import Listener, serve_listeners

from tests.kvsidecar.test_grpc_server import NAME, naming

LOOK_SECONDS, DEADLINE_SECONDS = 0.05, 30.0


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_watcher, "_LOOK_SECONDS", LOOK_SECONDS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "run"
    found.mkdir(mode=0o700)
    return found


def named_by(address: str) -> Callable[[], Awaitable[bytes]]:
    """Asks on one connection, again and again."""
    channel = aio_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])

    async def ask() -> bytes:
        return bytes(await channel.unary_unary(f"/{NAME}/Name")(b"", timeout=10))

    return ask


async def back(path: Path) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not path.is_socket():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_service_is_reached_again_after_its_folder_was_deleted_and_older_connections_live(
    folder: Path,
) -> None:
    path = folder / "s"
    async with serve_listeners(NAME, [Listener(path, naming(b"me"))], lambda: 0.0) as (address,):
        before = named_by(address)
        assert await before() == b"me"
        for _ in range(2):
            shutil.rmtree(folder)
            await back(path)
            assert path.stat().st_mode & 0o777 == 0o600
            assert folder.stat().st_mode & 0o777 == 0o700
            assert await named_by(address)() == b"me"
            assert await before() == b"me"
    assert list(folder.iterdir()) == []


async def test_what_another_process_has_bound_at_the_path_stays(folder: Path) -> None:
    path = folder / "s"
    async with serve_listeners(NAME, [Listener(path, naming(b"me"))], lambda: 0.0):
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(folder / "other"))
            (folder / "other").rename(path)
            bound = path.stat().st_ino
            await asyncio.sleep(5 * LOOK_SECONDS)
            assert path.stat().st_ino == bound


async def test_a_folder_that_cannot_be_used_is_waited_for(folder: Path) -> None:
    path = folder / "s"
    async with serve_listeners(NAME, [Listener(path, naming(b"me"))], lambda: 0.0) as (address,):
        folder.chmod(0o755)
        path.unlink()
        await asyncio.sleep(5 * LOOK_SECONDS)
        assert not path.exists(), "others could reach what is there"
        folder.chmod(0o700)
        await back(path)
        assert await named_by(address)() == b"me"


async def test_a_listener_whose_folder_stays_away_keeps_no_servers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real, many = list[weakref.ref[grpc.aio.Server]](), grpc_server._server, asyncio.Event()

    def counted(*given: Any) -> grpc.aio.Server:
        server = real(*given)
        made.append(weakref.ref(server))
        if len(made) == 6:
            many.set()
        return server

    monkeypatch.setattr(grpc_server, "_server", counted)
    async with serve_listeners(NAME, [Listener(folder / "s", naming(b"x"), group="")], lambda: 0.0):
        shutil.rmtree(folder)
        await asyncio.wait_for(many.wait(), DEADLINE_SECONDS)
        gc.collect()
        assert sum(one() is not None for one in made) <= 2
