"""How services listen: ports bound before the first answer, one health and one end, and nobody's socket taken away."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvsidecar import AsyncClient
from kvsidecar.errors import ConfigurationError, KVSidecarError
from kvsidecar.net.addresses import TcpAddress, parse_tcp, why_not_bindable
from kvsidecar.net.channel import aio_channel, channel, read_token
from kvsidecar.net.grpc_server import (
    CLIENT_KEEPALIVE,
    Endpoint,
    Listener,
    ListenerLimits,
    hold_socket_lock,
    serve_endpoint,
    serve_listeners,
)

NAME = "kvsidecar.test.Service"
SERVING = health_pb2.HealthCheckResponse.SERVING
ANYWHERE = TcpAddress("127.0.0.1", 0)


def naming(
    name: bytes, hold: asyncio.Event | None = None, arrived: asyncio.Semaphore | None = None
) -> Callable[[grpc.aio.Server], None]:
    """A servicer whose Name says which one it is, once ``hold`` is set; ``arrived`` is released by each call."""

    async def call(request: bytes, context: Any) -> bytes:
        if arrived is not None:
            arrived.release()
        if hold is not None:
            await hold.wait()
        return name

    handlers = {"Name": grpc.unary_unary_rpc_method_handler(call)}
    return lambda server: server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))


async def name_at(address: str, request: bytes = b"", metadata: Any = ()) -> bytes:
    async with aio_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as open_channel:
        return bytes(await open_channel.unary_unary(f"/{NAME}/Name")(request, timeout=10, metadata=metadata))


async def health_at(address: str, service: str = "") -> int:
    async with aio_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as open_channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return int((await health_pb2_grpc.HealthStub(open_channel).Check(request, timeout=10)).status)


# ---- listening ------------------------------------------------------------------------------------------------


async def test_a_tcp_port_answers_like_the_socket(tmp_path: Path) -> None:
    endpoint = Endpoint(NAME, tmp_path / "s", "127.0.0.1:0")
    async with serve_endpoint(endpoint, naming(b"one"), lambda: 0.0) as addresses:
        assert addresses[0] == f"unix:{tmp_path / 's'}"
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        for address in addresses:
            assert await name_at(address) == b"one"
            assert await health_at(address) == await health_at(address, NAME) == SERVING
    assert not (tmp_path / "s").exists()


async def test_a_proxy_in_the_environment_gets_no_plain_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, endpoint = list[object](), Endpoint(NAME, tmp_path / "s", "127.0.0.1:0")
    proxy = await asyncio.start_server(lambda _, writer: (reached.append(writer), writer.close()), "127.0.0.1", 0)
    async with proxy, serve_endpoint(endpoint, naming(b"one"), lambda: 0.0) as addresses:
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        assert await name_at(addresses[1]) == b"one"
        with pytest.raises(KVSidecarError):  # it has no such service
            await AsyncClient(addresses[1]).model()
    assert not reached


async def test_every_door_has_its_own_servicer(tmp_path: Path) -> None:
    doors = [
        Listener(tmp_path / "a", naming(b"a")),
        Listener(tmp_path / "b", naming(b"b"), group=""),
        Listener(ANYWHERE, naming(b"c")),
    ]
    async with serve_listeners(NAME, doors, lambda: 0.0) as addresses:
        assert [await name_at(address) for address in addresses] == [b"a", b"b", b"c"]
        assert [(tmp_path / x).stat().st_mode & 0o777 for x in "ab"] == [0o600, 0o660]


async def test_a_door_without_a_servicer_answers_health_alone(tmp_path: Path) -> None:
    endpoint = Endpoint(NAME, tmp_path / "s", health_tcp="127.0.0.1:0")
    async with serve_endpoint(endpoint, naming(b"a"), lambda: 0.0) as (_, address):
        assert await health_at(address) == await health_at(address, NAME) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await name_at(address)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        async with aio_channel(address) as open_channel:
            # As a call of one message: what is still on its way of a stream when it is refused may be an error, too.
            ask = open_channel.unary_unary("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
            assert await ask(b"", timeout=10).code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_door_that_cannot_open_leaves_nothing_behind(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = TcpAddress(*taken.getsockname()[:2])
        with pytest.raises(ConfigurationError, match=f"cannot listen on {busy}: Address already in use; choose"):
            async with serve_listeners(
                NAME, [Listener(tmp_path / "s", naming(b"")), Listener(busy, naming(b""))], lambda: 0.0
            ):
                pytest.fail("it serves although a door is shut")
    assert list(tmp_path.iterdir()) == []


async def test_the_end_waits_for_calls_at_all_doors_together(tmp_path: Path) -> None:
    hold, arrived = asyncio.Event(), asyncio.Semaphore(0)
    doors = [Listener(tmp_path / name, naming(name.encode(), hold, arrived)) for name in ("a", "b")]
    async with serve_listeners(NAME, doors, lambda: 5.0) as addresses:
        calls = [asyncio.create_task(name_at(address)) for address in addresses]
        for _ in calls:
            await arrived.acquire()
        asyncio.get_running_loop().call_later(0.3, hold.set)
        before = time.monotonic()
    assert await asyncio.gather(*calls) == [b"a", b"b"]
    assert time.monotonic() - before < 4


async def test_health_says_that_the_end_has_begun(tmp_path: Path) -> None:
    async with serve_endpoint(Endpoint(NAME, tmp_path / "s"), naming(b""), lambda: 1.0) as (address,):
        open_channel = aio_channel(address)
        watch = health_pb2_grpc.HealthStub(open_channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        last = asyncio.create_task(watch.read())
    assert (await last).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await open_channel.close()


async def test_too_much_metadata_is_refused(tmp_path: Path) -> None:
    limits = ListenerLimits(metadata_bytes=4096)
    async with serve_listeners(NAME, [Listener(tmp_path / "s", naming(b"yes"))], lambda: 0.0, limits) as (address,):
        assert await name_at(address, metadata=[("x", "y" * 1000)]) == b"yes"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await name_at(address, metadata=[("x", "y" * 8000)])
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_too_long_a_message_is_refused(tmp_path: Path) -> None:
    limits = ListenerLimits(message_bytes=1000)
    async with serve_listeners(NAME, [Listener(tmp_path / "s", naming(b"yes"))], lambda: 0.0, limits) as (address,):
        assert await name_at(address, bytes(900)) == b"yes"
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max"):
            await name_at(address, bytes(2000))


async def test_a_connection_has_only_so_many_calls_at_once(tmp_path: Path) -> None:
    hold, running = asyncio.Event(), 0

    def counting(server: grpc.aio.Server) -> None:
        async def call(request: bytes, context: Any) -> bytes:
            nonlocal running
            running += 1
            await hold.wait()
            return b""

        handlers = {"Name": grpc.unary_unary_rpc_method_handler(call)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))

    at_door = serve_listeners(NAME, [Listener(tmp_path / "s", counting)], lambda: 0.0, ListenerLimits(streams=3))
    async with at_door as (address,), aio_channel(address) as open_channel:
        await open_channel.channel_ready()
        calls = [open_channel.unary_unary(f"/{NAME}/Name")(b"", timeout=20) for _ in range(8)]
        async with asyncio.timeout(20):
            while running < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        assert running == 3, "no more of them come"
        for call in calls:
            call.cancel()


async def test_our_clients_pings_are_not_too_fast_for_our_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that pings faster than permitted is told to go away; time is made 50 times faster on both sides, but for
    the answer to a ping, which a busy machine may keep waiting."""
    from kvsidecar.net import grpc_server

    for name in ("_SERVER_KEEPALIVE_MS", "_CLIENT_KEEPALIVE_MS", "_MIN_PING_INTERVAL_MS"):
        monkeypatch.setattr(grpc_server, name, getattr(grpc_server, name) // 50)
    faster = [(key, value if "timeout" in key else value // 50) for key, value in CLIENT_KEEPALIVE]
    hold = asyncio.Event()
    at_door = serve_listeners(NAME, [Listener(ANYWHERE, naming(b"late", hold))], lambda: 0.0)
    async with at_door as (address,), aio_channel(address, options=faster) as open_channel:
        call = asyncio.ensure_future(open_channel.unary_unary(f"/{NAME}/Name")(b"", timeout=30))
        await asyncio.sleep(4)
        hold.set()
        assert await call == b"late"


# ---- one process per socket -----------------------------------------------------------------------------------


def test_a_dead_ones_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with hold_socket_lock(path):
        assert not path.exists()


def test_a_live_one_with_a_full_backlog_is_not_taken_for_dead(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen(0)
        waiting = []
        while True:
            caller = socket.socket(socket.AF_UNIX)
            caller.setblocking(False)
            waiting.append(caller)
            if caller.connect_ex(str(path)):
                break
        with pytest.raises(ConfigurationError, match="another daemon listens on"), hold_socket_lock(path):
            pytest.fail("two at once")
        assert path.is_socket()
        for caller in waiting:
            caller.close()


def test_what_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("somebody's notes")
    with pytest.raises(ConfigurationError, match="is no socket"), hold_socket_lock(path):
        pytest.fail("it was taken")
    assert path.read_text() == "somebody's notes"


def _try(path: Path, begin: Any, inside: Any, came: Any, together: Any, leave: Any) -> None:
    begin.wait()
    try:
        with hold_socket_lock(path):
            with inside.get_lock():
                inside.value += 1
            came.set()
            leave.wait(30)
    except ConfigurationError:
        pass
    together.release()


def test_of_many_that_start_at_once_one_comes_in(tmp_path: Path) -> None:
    path = tmp_path / "s"
    context = multiprocessing.get_context("fork")
    for _ in range(5):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        begin, came, leave, done = context.Event(), context.Event(), context.Event(), context.Semaphore(0)
        inside = context.Value("i", 0)
        processes = [context.Process(target=_try, args=(path, begin, inside, came, done, leave)) for _ in range(6)]
        for process in processes:
            process.start()
        begin.set()
        for _ in range(5):
            assert done.acquire(timeout=30)
        assert came.wait(30)  # the others may have been refused before it was told that it is in
        assert inside.value == 1
        leave.set()
        for process in processes:
            process.join(30)


HOLD = """
import sys
from pathlib import Path
from kvsidecar.net.grpc_server import hold_socket_lock
with hold_socket_lock(Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


def test_the_place_is_free_when_its_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(ConfigurationError), hold_socket_lock(path):
            pytest.fail("two at once")
        process.kill()
    with hold_socket_lock(path):
        pass


# ---- addresses and channels -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:7401", "127.0.0.1", 7401, True),
        ("[::1]:0", "::1", 0, True),
        ("localhost:1", "localhost", 1, True),
        ("0.0.0.0:1", "0.0.0.0", 1, False),
        ("[::]:1", "::", 1, False),
        ("localhost.example:1", "localhost.example", 1, False),
    ],
)
def test_addresses_are_read(text: str, host: str, port: int, loopback: bool) -> None:
    address = parse_tcp(text)
    assert (address.host, address.port, address.loopback, str(address)) == (host, port, loopback, text)


@pytest.mark.parametrize(
    "text", ["", "7401", ":7401", "host:", "host:x", "::1:7401", "h:65536", "h:-1", "[h]:1:2", "h:²"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        parse_tcp(text)


def test_a_name_that_does_not_exist_cannot_be_bound() -> None:
    assert "is no address of this machine" in why_not_bindable(TcpAddress("no-such-host.invalid", 7401))
    assert why_not_bindable(ANYWHERE) == ""


def test_a_token_is_not_sent_where_it_makes_no_sense(tmp_path: Path) -> None:
    for target in (tmp_path / "s", str(tmp_path / "s"), f"unix:{tmp_path / 's'}"):
        with pytest.raises(ConfigurationError, match="is a Unix socket"):
            channel(target, token="t")


def test_files_of_a_client_are_named_when_they_cannot_be_read(tmp_path: Path) -> None:
    for way in ({"ca": tmp_path / "none"}, {"certificate": tmp_path / "none", "key": tmp_path / "none"}):
        with pytest.raises(ConfigurationError, match=f"{tmp_path / 'none'}: No such file"):
            channel("127.0.0.1:7401", **way)
    with pytest.raises(ConfigurationError, match="go together"):
        channel("127.0.0.1:7401", key=tmp_path / "none")


def test_a_token_file_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("abc.123\n")
    assert read_token(file) == "abc.123"
    for text in ("", "\n", "two words", "two\nlines", "é"):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match="holds no token"):
            read_token(file)


async def test_a_token_never_goes_over_a_plain_connection() -> None:
    """With a token the channel speaks TLS; a server that does not gets no readable byte of it."""
    heard = bytearray()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.extend(await reader.read(65536))
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with aio_channel(f"127.0.0.1:{port}", token="very-secret-token") as open_channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await open_channel.unary_unary(f"/{NAME}/Name")(b"", timeout=30)
    server.close()
    assert heard[:1] == b"\x16", "a TLS handshake"
    assert b"very-secret-token" not in heard


def test_the_lock_is_not_inherited(tmp_path: Path) -> None:
    """A child that outlives the daemon must not keep its place."""
    with hold_socket_lock(tmp_path / "s"), subprocess.Popen(["sleep", "30"], close_fds=False) as child:
        held = []
        for fd in os.listdir(f"/proc/{child.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # a library's that it has just loaded
                held.append(os.readlink(f"/proc/{child.pid}/fd/{fd}"))
        child.kill()
    assert not any(path.endswith("s.lock") for path in held)
