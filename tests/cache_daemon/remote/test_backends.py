"""The contract of remote backends, on real servers."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.condition_wait import until_async
from benchmarks.node import free_port
from benchmarks.remote_servers import (
    AzureServer,
    RedisCluster,
    RedisServer,
    S3Server,
    why_no_azure,
    why_no_s3,
    why_no_valkey,
)
from cache_daemon.durable.lmdb_tier import LmdbTier
from cache_daemon.remote.address import Credentials, parse_remote
from cache_daemon.remote.backend import OVERSIZE, RemoteBackend, RemoteFailed
from cache_daemon.remote.backend_factory import new_backend
from cache_daemon.remote.redis_backend import RedisBackend
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend
from tests.cache_daemon.remote.nodes import CHUNK, node, prompt
from tests.cache_daemon.stores import opened

KINDS = ("memory", "valkey", "cluster", "s3", "azure")
SECRETS = {"s3": S3Server.secret, "azure": AzureServer.secret}
WHY_NOT = {"s3": why_no_s3, "azure": why_no_azure}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """URL of each backend, started once per module at its first use."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        class Lazily(dict[str, str]):
            def __missing__(self, kind: str) -> str:
                if why := WHY_NOT.get(kind, why_no_valkey)():
                    pytest.skip(why)
                folder = tmp_path_factory.mktemp(kind)
                if kind == "valkey":
                    self[kind] = f"redis://127.0.0.1:{stack.enter_context(RedisServer(folder)).port}?prefix=e"
                elif kind == "cluster":
                    self[kind] = f"{stack.enter_context(RedisCluster(folder)).url}?prefix=e"
                elif kind == "s3":
                    self[kind] = stack.enter_context(S3Server(folder)).url
                else:
                    self[kind] = stack.enter_context(AzureServer(folder)).url
                return self[kind]

        yield Lazily()


@pytest.fixture(params=KINDS)
async def engine(request: pytest.FixtureRequest, urls: dict[str, str]) -> AsyncIterator[RemoteBackend]:
    if request.param == "memory":
        yield InMemoryBackend()
        return
    url = urls[request.param]
    found = new_backend(parse_remote(url), Credentials(SECRETS.get(request.param, "")))
    await found.connect()
    yield found
    await found.close()


async def test_values_come_back_in_the_order_asked(engine: RemoteBackend) -> None:
    large = bytes(range(256)) * 4096
    await engine.put_many([("a/1", b"one"), ("a/2", memoryview(large)), ("b/1", b"x")], None)
    for lane in range(engine.lanes):
        assert await engine.get_many(["b/1", "a/2", "a/none", "a/1"], lane) == [b"x", large, None, b"one"]
    assert await engine.get_many([]) == []


async def test_a_value_that_is_too_long_is_not_transferred(engine: RemoteBackend) -> None:
    await engine.put_many([("l/1", b"x" * 64), ("l/2", b"x" * 65), ("l/3", b"y" * 200_000)], None)
    names, limits = ["l/1", "l/2", "l/none", "l/3"], [64, 64, 64, 200_000]
    for lane in range(engine.lanes):
        assert await engine.get_many(names, lane, limits) == [b"x" * 64, OVERSIZE, None, b"y" * 200_000]


async def test_values_are_replaced_and_deleted(engine: RemoteBackend) -> None:
    await engine.put_many([("c/1", b"old"), ("c/2", b"x")], None)
    await engine.put_many([("c/1", b"new")], 600)
    assert await engine.get_many(["c/1"]) == [b"new"]
    await engine.delete_many(["c/1", "c/none"])
    await engine.delete_many([])
    assert await engine.get_many(["c/1", "c/2"]) == [None, b"x"]


async def test_what_is_not_there_leaves_nothing_else_there(engine: RemoteBackend) -> None:
    names = [f"del/{i}" for i in range(40)]
    await engine.put_many([(name, b"x") for name in names], None)
    await engine.delete_many(["del/none", *names[:20], "del/neither", *names[20:]])
    assert await engine.get_many(names) == [None] * len(names)


async def test_of_those_who_store_what_is_absent_one_wins(engine: RemoteBackend) -> None:
    await asyncio.gather(*(engine.put_if_absent("i/mark", bytes([n])) for n in range(4)))
    (first,) = await engine.get_many(["i/mark"])
    assert first in {bytes([n]) for n in range(4)}
    await engine.put_if_absent("i/mark", b"late")
    assert await engine.get_many(["i/mark"]) == [first]


async def test_a_scan_finds_what_begins_so(engine: RemoteBackend) -> None:
    wanted = {f"d/{i}/head" for i in range(30)}
    await engine.put_many([(name, b"x") for name in [*wanted, "dd/1", "e/1"]], None)
    found = {name async for page in engine.scan("d/") for name in page}
    assert found == wanted
    assert [page async for page in engine.scan("nothing/") if page] == []


@pytest.mark.parametrize("kind", ["valkey", "cluster"])
async def test_names_that_cannot_be_ours_keep_nobody_from_deleting(kind: str, urls: dict[str, str]) -> None:
    """A server that others use, too: its names are any bytes."""
    engine = new_backend(parse_remote(urls[kind].replace("prefix=e", "prefix=names")), Credentials(""))
    assert isinstance(engine, RedisBackend)
    async with node(engine, prefix="names") as a:
        await a.share(prompt(2))
        begin = a.tier.key_schema.tenant_prefix(a.bench.root()).encode()
        strangers = [begin + b"\xff\xfe", begin + b"\xc3/head", begin + b" /head"]
        for name in strangers:
            await engine._client(0).set(name, b"x")
        assert len(await a.tier.list_prefix_hashes(a.bench.root())) == 2
        await asyncio.wait_for(asyncio.shield(a.remote.delete(a.bench.root(), b"")), 20)
        assert await a.tier.list_prefix_hashes(a.bench.root()) == []
        await engine._client(0).unlink(strangers)


async def test_many_large_values_at_once(engine: RemoteBackend) -> None:
    values = {f"g/{i}": bytes([i]) * engine.part_bytes for i in range(4)}
    await engine.put_many(list(values.items()), 600)
    assert await engine.get_many(list(values)) == list(values.values())


async def test_nodes_share_over_it(engine: RemoteBackend) -> None:
    async with node(engine, ttl_seconds=600) as a, node(engine) as b:
        await a.share(prompt(4))
        assert (await b.ask(prompt(4), patience=20.0))[0] == 4 * CHUNK
        await a.bench.store.delete(a.bench.root(), b"")
        await until_async(lambda: a.stats.remote_deletions == 0)
        async with node(engine) as c:
            assert (await c.ask(prompt(4)))[0] == 0


class Apart:
    """A backend that cannot be reached while it is ``away``."""

    def __init__(self, engine: RemoteBackend) -> None:
        self._engine, self.away = engine, False

    def __getattr__(self, name: str) -> Any:
        if self.away and name in ("connect", "get_many", "put_many", "put_if_absent", "delete_many", "scan"):
            raise RemoteFailed("it is away")
        return getattr(self._engine, name)

    async def close(self) -> None:
        """Do nothing: other nodes use this backend, too."""


@pytest.mark.parametrize("away", [False, True])
async def test_what_a_tenant_deleted_is_found_in_no_tier(engine: RemoteBackend, tmp_path: Path, away: bool) -> None:
    """Arena, disk and engine, here and by another node, over a restart; also where the engine is away meanwhile."""
    between, prefix = Apart(engine), f"forgotten-{away}"
    gone, other = b"who deletes", b"who does not"
    async with node(between, prefix=prefix, ttl_seconds=600, tier=disk_in(tmp_path)) as a:
        for salt in (gone, other):
            await a.share(prompt(3), salt=salt)
        await a.bench.store.settle()
        assert (a.stats.arena_chunks, a.stats.durable_chunks, a.stats.remote_written_chunks) == (6, 6, 6)
        between.away = away
        await a.bench.store.delete(a.bench.root(gone), b"")
        assert (await a.ask(prompt(3), salt=gone))[0] == 0
        assert (await a.ask(prompt(3), salt=other))[0] == 3 * CHUNK
        await a.bench.store.settle()
        await until_async(lambda: a.stats.remote_deletions == int(away))
        assert (a.stats.arena_chunks, a.stats.durable_chunks) == (3, 3)
    async with opened(tier=disk_in(tmp_path)) as alone:
        assert (await alone.found(prompt(3), salt=gone), await alone.found(prompt(3), salt=other)) == (0, 3 * CHUNK)
    between.away = False
    async with node(between, prefix=prefix, tier=disk_in(tmp_path)) as a:
        assert (await a.ask(prompt(3), salt=gone, patience=20.0))[0] == 0
        await until_async(lambda: a.stats.remote_deletions == 0)
    async with node(between, prefix=prefix) as b:
        assert (await b.ask(prompt(3), salt=gone, patience=20.0))[0] == 0
        assert (await b.ask(prompt(3), salt=other, patience=20.0))[0] == 3 * CHUNK
        root = b.bench.root(gone).hex()
    names = [name async for page in engine.scan(f"{prefix}/") for name in page]
    assert {name.rpartition("/")[2] for name in names if root in name} == {"mark"}


def disk_in(folder: Path) -> LmdbTier:
    return LmdbTier(folder / "store", 1 << 20)


@pytest.mark.parametrize("kind", ["valkey", "cluster"])
async def test_values_end_by_themselves(kind: str, urls: dict[str, str]) -> None:
    engine = new_backend(parse_remote(urls[kind]), Credentials())
    await engine.connect()
    await engine.put_many([("h/1", b"x")], 1)
    await engine.put_many([("h/2", b"x")], 100)
    deadline = time.monotonic() + 30
    while (await engine.get_many(["h/1", "h/2"])) != [None, b"x"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    await engine.close()


async def asked(engine: RemoteBackend) -> list[bytes | None]:
    """Read a name through a new backend client."""
    await engine.connect()
    return await engine.get_many(["x"])


@pytest.mark.parametrize("scheme", ["redis", "valkey-cluster", "s3"])
async def test_nobody_there_is_a_failure_and_says_so_soon(scheme: str) -> None:
    why = why_no_s3() if scheme == "s3" else why_no_valkey()
    if why:
        pytest.skip(why)
    where = (
        f"s3://bucket/p?endpoint=http://127.0.0.1:{free_port()}"
        if scheme == "s3"
        else f"{scheme}://127.0.0.1:{free_port()}"
    )
    engine = new_backend(parse_remote(where), Credentials("secret" if scheme == "s3" else ""))
    began = time.monotonic()
    with pytest.raises(RemoteFailed) as caught:
        await asked(engine)
    assert time.monotonic() - began < 10
    assert "secret" not in str(caught.value)
    await engine.close()


@pytest.mark.skipif(bool(why_no_valkey()), reason=why_no_valkey())
@pytest.mark.parametrize("scheme", ["redis", "valkey-cluster"])
@pytest.mark.parametrize("where", ["silent", "refused", "unroutable"])
async def test_connecting_leaves_the_event_loop_alone(scheme: str, where: str) -> None:
    """A thread shows how often a free loop would have turned meanwhile on this machine."""
    turns, possible, over = 0, 0, threading.Event()

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    def count() -> None:
        nonlocal possible
        while not over.wait(0.01):
            possible += 1

    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts, nobody answers
        port = silent.getsockname()[1] if where == "silent" else free_port()
        host = "10.255.255.1:6379" if where == "unroutable" else f"127.0.0.1:{port}"
        engine = new_backend(parse_remote(f"{scheme}://{host}"), Credentials())
        turning = asyncio.create_task(turn())
        counting = threading.Thread(target=count)
        counting.start()
        with pytest.raises((RemoteFailed, TimeoutError)):
            async with asyncio.timeout(0.8):
                await engine.connect()
        over.set()
        counting.join()
        turning.cancel()
        await engine.close()
    assert turns >= possible / 4 - 3


@pytest.mark.skipif(bool(why_no_valkey()), reason=why_no_valkey())
async def test_a_password_is_needed_and_never_told(tmp_path: Path) -> None:
    with RedisServer(tmp_path, ("--requirepass", "hush-hush")) as server:
        url = parse_remote(f"redis://127.0.0.1:{server.port}")
        for wrong in ("", "guess"):
            engine = new_backend(url, Credentials(wrong))
            with pytest.raises(RemoteFailed) as caught:
                await asked(engine)
            assert "guess" not in str(caught.value)
            await engine.close()
        credentials = Credentials("hush-hush")
        assert "hush" not in repr(credentials)
        engine = new_backend(url, credentials)
        assert await asked(engine) == [None]
        await engine.close()


@pytest.mark.skipif(bool(why_no_valkey()), reason=why_no_valkey())
async def test_a_user_needs_no_more_rights_than_security_says(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text(encoding="utf-8")
    rights = page.partition("~kvsidecar/*")[2].partition("`")[0].split()
    assert "+@read" in rights
    with RedisServer(tmp_path) as server:
        server.command("ACL", "SETUSER", "kvsidecar", "on", ">hush-hush", "~kvsidecar/*", *rights)
        engine = new_backend(parse_remote(f"redis://kvsidecar@127.0.0.1:{server.port}"), Credentials("hush-hush"))
        async with node(engine, prefix="kvsidecar", ttl_seconds=60) as a, node(engine, prefix="kvsidecar") as b:
            await a.share(prompt(3))
            assert (await b.ask(prompt(3)))[0] == 3 * CHUNK
            await a.bench.store.delete(a.bench.root(), b"")
            await until_async(lambda: a.stats.remote_deletions == 0)
        await engine.connect()
        with pytest.raises(RemoteFailed, match="may not do that"):
            await engine.put_many([("others/1", b"x")], None)
        await engine.close()


@pytest.mark.parametrize(("kind", "wrong"), [("s3", "guess"), ("azure", "Z3Vlc3M=")])
async def test_a_key_that_is_not_taken_is_said_and_not_shown(kind: str, wrong: str, urls: dict[str, str]) -> None:
    engine = new_backend(parse_remote(urls[kind]), Credentials(wrong))
    with pytest.raises(RemoteFailed, match="the store does not take the key") as caught:
        await asked(engine)
    assert wrong not in str(caught.value)
    await engine.close()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("GET http://h/p/ab507c/head in 1.5ms - HTTP error: error sending request, kind: Connect", "be connected to"),
        ("PUT http://h/p/x in 1.507ms - Server returned non-2xx status code: 400 Bad Request: no", "says Exception"),
        ("PUT http://h/p/x - Server returned non-2xx status code: 507 Insufficient Storage: none", "the store is full"),
        ("token request: Error performing GET http://169.254.169.254/x, kind: Connect", "no key is given"),
    ],
)
def test_what_a_store_says_is_not_taken_from_a_name_or_a_time(said: str, told: str) -> None:
    from cache_daemon.remote.object_store_backend import _reason

    assert told in _reason(Exception(f"Generic S3 error: Error performing {said}"))
