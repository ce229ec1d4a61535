"""The guard: nothing of an unknown caller is read, nobody is waited for without end, and logs hold no secrets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvsidecar.errors import Context, DeadlineExceeded, Unauthenticated, from_rpc
from kvsidecar.net.addresses import TcpAddress
from kvsidecar.net.channel import aio_channel
from kvsidecar.net.grpc_server import Listener, serve_listeners

from benchmarks.certificate_authority import CertificateAuthority
from benchmarks.condition_wait import until_async
from cache_daemon import listeners
from cache_daemon.auth.authenticator import RefusalLog
from cache_daemon.auth.interceptor import AuthInterceptor, InterceptorTimeouts
from cache_daemon.auth.principal import GUEST, Principal
from tests.cache_daemon.auth.conftest import ALICE, BOB, Running, refused
from tests.cache_daemon.auth.echo import SERVICE, Echo

STALL = 0.3
LONG = 60.0  # for calls that must succeed


def knows_friends(context: Context) -> Principal:
    if ("friend", "yes") not in tuple(context.invocation_metadata() or ()):
        raise Unauthenticated("say that you are a friend")
    return GUEST


class Behind:
    """An echo service behind an interceptor, and a channel to it."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.echo = Echo(knows_friends)
        self._stack = stack
        self.channel: grpc.aio.Channel

    async def open(self, call_seconds: float = STALL, stall_seconds: float = STALL) -> Behind:
        timeouts = InterceptorTimeouts(call_seconds=call_seconds, stall_seconds=stall_seconds)
        guard = AuthInterceptor(knows_friends, timeouts)
        door = Listener(TcpAddress("127.0.0.1", 0), self.echo.add_to, interceptors=(guard,))
        addresses = await self._stack.enter_async_context(serve_listeners(SERVICE, [door], lambda: 0.0))
        self.channel = await self._stack.enter_async_context(
            aio_channel(addresses[0], options=[("grpc.use_local_subchannel_pool", 1)])
        )
        return self


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def patient(stack: AsyncExitStack) -> Behind:
    """A service behind an interceptor with long timeouts."""
    return await Behind(stack).open(LONG, LONG)


@dataclass(frozen=True)
class LateRequests(InterceptorTimeouts):
    """Timeouts for a machine on which a request arrives late."""

    request_seconds: float = LONG
    overload_seconds: float = 2.0


@pytest.fixture
def late_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "InterceptorTimeouts", LateRequests)


FRIEND = [("friend", "yes")]


async def test_a_message_is_not_received_before_its_sender_is_known(patient: Behind) -> None:
    call = patient.channel.unary_unary(f"/{SERVICE}/Whoami")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(bytes(8 << 20), timeout=10)
    assert isinstance(from_rpc(caught.value), Unauthenticated)
    assert patient.echo.received == []
    assert await call(b"small", metadata=FRIEND, timeout=10) == b"guest"
    assert patient.echo.received == [b"small"]


async def test_a_call_without_a_message_is_refused(patient: Behind) -> None:
    call = patient.channel.stream_unary(f"/{SERVICE}/Whoami")(metadata=FRIEND, timeout=10)
    await call.done_writing()
    with pytest.raises(grpc.aio.AioRpcError, match="has no message"):
        await call


async def test_a_call_that_takes_too_long_ends(stack: AsyncExitStack) -> None:
    behind = await Behind(stack).open(call_seconds=3.0)
    call = behind.channel.unary_unary(f"/{SERVICE}/Sleep")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"30", metadata=FRIEND, timeout=10)
    assert "longer than 3 s" in str(from_rpc(caught.value))
    assert await call(b"0", metadata=FRIEND, timeout=10) == b"awake"


async def test_a_sender_that_stalls_is_not_waited_for(stack: AsyncExitStack) -> None:
    behind = await Behind(stack).open(stall_seconds=2.0)  # the first message arrives sooner
    call = behind.channel.stream_unary(f"/{SERVICE}/Up")(metadata=FRIEND, timeout=10)
    await call.write(b"one")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert isinstance(from_rpc(caught.value), DeadlineExceeded)
    assert "sent nothing" in str(from_rpc(caught.value))
    assert behind.echo.received == [b"one"]


async def test_a_reader_that_stalls_is_not_waited_for_and_what_it_held_is_free(stack: AsyncExitStack) -> None:
    behind = await Behind(stack).open(stall_seconds=1.0)  # the first message is read sooner
    call = behind.channel.unary_stream(f"/{SERVICE}/Down")(b"64", metadata=FRIEND, timeout=10)
    assert len(await call.read()) == 1 << 20
    async with asyncio.timeout(5):
        await behind.echo.closed.wait()
    call.cancel()


async def test_a_reader_that_goes_frees_what_it_held(stack: AsyncExitStack) -> None:
    """At once, rather than when its time for the next message is over."""
    behind = await Behind(stack).open(stall_seconds=120.0)
    call = behind.channel.unary_stream(f"/{SERVICE}/Down")(b"1000000", metadata=FRIEND, timeout=120)
    assert len(await call.read()) == 1 << 20
    call.cancel()
    async with asyncio.timeout(30):
        await behind.echo.closed.wait()


async def test_streams_of_both_kinds_go_through(patient: Behind) -> None:
    call = patient.channel.stream_unary(f"/{SERVICE}/Up")(iter([b"a", b"b", b"c"]), metadata=FRIEND, timeout=10)
    assert await call == b"3"
    answers = patient.channel.unary_stream(f"/{SERVICE}/Down")(b"3", metadata=FRIEND, timeout=10)
    assert [len(a) async for a in answers] == [1 << 20] * 3


def test_refusals_are_logged_once_a_second_with_their_number() -> None:
    times = [0.0, 0.1, 0.2, 0.9, 1.1, 1.2]
    log = RefusalLog(iter(times).__next__)
    with structlog.testing.capture_logs() as lines:
        for _ in times:
            log.note("ipv4:10.0.0.1:5", "/x/Y", Unauthenticated("no"))
    assert [line["refused"] for line in lines] == [1, 4]


async def test_neither_logs_nor_stderr_hold_secrets(
    tls: Running, authority: CertificateAuthority, tenants_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with structlog.testing.capture_logs() as lines:
        await refused(tls.call("Whoami", token="a-secret-that-is-wrong", ca=authority.ca), Unauthenticated)
        assert await tls.call("Use", b"salt-of-alice", token=ALICE, ca=authority.ca) == b"used"
        tenants_file.write_text('[tenant.alice]\nsalt = "salt-of-alice\n')
        assert not tls.tenants.reload()
        tenants_file.write_text('[tenant.alice]\nsalt = "salt-of-alice"\ntokens = ["a-token-in-clear"]\n')
        assert not tls.tenants.reload()
    output = capfd.readouterr()
    text = repr(lines) + output.out + output.err + repr(tls.tenants())
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == ["a caller was refused"]
    for secret in ("a-secret-that-is-wrong", ALICE, "salt-of-alice", "a-token-in-clear"):
        assert secret not in text


# ---- questions that arrive slowly ------------------------------------------------------------------------------


@pytest.mark.usefixtures("late_requests")
async def test_questions_that_never_arrive_keep_no_other_call_of_their_caller_out(
    tls: Running, authority: CertificateAuthority
) -> None:
    silent_channel = await tls.channel(token=ALICE, ca=authority.ca)
    silent = [
        silent_channel.stream_unary(f"/{SERVICE}/Whoami")(timeout=30)
        for _ in range(InterceptorTimeouts.max_pending + 8)
    ]
    async with asyncio.timeout(9):  # beyond so many, a question has a moment to arrive
        while sum(call.done() for call in silent) < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    refusals = {await call.code() for call in silent if call.done()}
    assert refusals == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert await tls.call("Whoami", token=ALICE, ca=authority.ca) == b"alice"
    assert await tls.call("Whoami", token=BOB, ca=authority.ca) == b"bob"
    assert sum(call.done() for call in silent) == 8, "the others are awaited"
    for call in silent:
        call.cancel()


async def test_a_question_that_does_not_arrive_ends_its_call(patient: Behind) -> None:
    guard = AuthInterceptor(knows_friends, InterceptorTimeouts(request_seconds=STALL))
    door = Listener(TcpAddress("127.0.0.1", 0), patient.echo.add_to, interceptors=(guard,))
    async with serve_listeners(SERVICE, [door], lambda: 0.0) as addresses, aio_channel(addresses[0]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stream_unary(f"/{SERVICE}/Whoami")(metadata=FRIEND, timeout=10)
        assert "did not arrive within 0.3 s" in str(from_rpc(caught.value))


async def test_reflection_calls_of_one_caller_have_a_limit(patient: Behind) -> None:
    guard = AuthInterceptor(knows_friends, InterceptorTimeouts(max_reflections=2))
    door = Listener(TcpAddress("127.0.0.1", 0), patient.echo.add_to, interceptors=(guard,))
    async with serve_listeners(SERVICE, [door], lambda: 0.0) as addresses, aio_channel(addresses[0]) as channel:
        method = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        calls = [method(metadata=FRIEND, timeout=30) for _ in range(3)]
        await until_async(lambda: any(call.done() for call in calls))
        (extra,) = [call for call in calls if call.done()]
        assert await extra.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first, second = [call for call in calls if call is not extra]
        first.cancel()
        async with asyncio.timeout(10):  # the server ends a call slightly later than its client
            while await method(iter(()), metadata=FRIEND, timeout=10).code() is not grpc.StatusCode.OK:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        second.cancel()


async def test_a_health_check_without_a_name_may_not_be_long(tls: Running, authority: CertificateAuthority) -> None:
    channel = await tls.channel(ca=authority.ca)
    stub = health_pb2_grpc.HealthStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="x" * 5000), timeout=10)
    assert "5003 bytes; at most 4096" in str(from_rpc(caught.value))
    assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status == 1


async def test_a_door_of_health_alone_takes_no_long_question() -> None:
    async with (
        serve_listeners(SERVICE, [Listener(TcpAddress("127.0.0.1", 0), None)], lambda: 0.0) as addresses,
        aio_channel(addresses[0]) as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="x" * 5000), timeout=10)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status == 1
