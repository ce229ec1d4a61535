"""Calls that arrive while a gRPC server shuts down."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import grpc
import pytest
from kvsidecar.errors import Unavailable, from_rpc
from kvsidecar.net.channel import channel
from kvsidecar.net.grpc_server import Endpoint, Listener, serve_endpoint, serve_listeners, stop_on_signals

from tests.kvsidecar.test_grpc_server import NAME, SERVING, health_at, name_at, naming


async def call_until_refused(address: str, failures: list[grpc.RpcError]) -> threading.Thread:
    """Call all the time on a thread, as a gateway does, until the first failure. Returns after the first answer."""
    is_answered = threading.Event()

    def ask() -> None:
        with channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as open_channel:
            call = open_channel.unary_unary(f"/{NAME}/Name")
            try:
                while True:
                    call(b"", timeout=10)
                    is_answered.set()
            except grpc.RpcError as error:
                failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert await asyncio.to_thread(is_answered.wait, 60)
    return thread


async def test_calls_that_arrive_while_a_server_shuts_down_are_unavailable_and_not_cancelled(tmp_path: Path) -> None:
    """gRPC cancels calls that its shutdown finds unread."""
    failures: list[grpc.RpcError] = []
    async with serve_listeners(NAME, [Listener(tmp_path / "s", naming(b""))], lambda: 5.0) as (address,):
        callers = [await call_until_refused(address, failures) for _ in range(8)]
        time.sleep(0.3)  # noqa: ASYNC251 - calls arrive, and the loop reads none of them
    await asyncio.gather(*(asyncio.to_thread(caller.join) for caller in callers))
    assert grpc.StatusCode.CANCELLED in {error.code() for error in failures}, "the case under test"
    assert {type(from_rpc(error)) for error in failures} == {Unavailable}


async def test_an_endpoint_refuses_calls_before_it_shuts_down_and_finishes_running_ones(tmp_path: Path) -> None:
    failures: list[grpc.RpcError] = []
    hold, arrived = asyncio.Event(), asyncio.Semaphore(0)
    other = Listener(tmp_path / "held", naming(b"held", hold, arrived))
    endpoint = Endpoint(NAME, tmp_path / "s", others=(other,), refuse_seconds=5.0)
    async with serve_endpoint(endpoint, naming(b""), lambda: 5.0) as (address, held):
        running = asyncio.create_task(name_at(held))
        await arrived.acquire()
        callers = [await call_until_refused(address, failures) for _ in range(8)]
        asyncio.get_running_loop().call_later(5.5, hold.set)
        time.sleep(0.3)  # noqa: ASYNC251 - calls arrive, and the loop reads none of them
    assert await running == b"held"
    await asyncio.gather(*(asyncio.to_thread(caller.join) for caller in callers))
    assert {(error.code(), error.details()) for error in failures} == {
        (grpc.StatusCode.UNAVAILABLE, "this server is shutting down and takes no new calls; try again")
    }


async def test_an_endpoint_that_nobody_calls_shuts_down_at_once(tmp_path: Path) -> None:
    async with serve_endpoint(Endpoint(NAME, tmp_path / "s", refuse_seconds=30), naming(b""), lambda: 5.0) as (
        address,
    ):
        assert await health_at(address) == SERVING
        began = time.monotonic()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("refuse_seconds", [60.0, 0.0])
async def test_a_second_signal_ends_the_refusing_and_running_calls(tmp_path: Path, refuse_seconds: float) -> None:
    hold, arrived, stop, at_once = asyncio.Event(), asyncio.Semaphore(0), asyncio.Event(), asyncio.Event()
    stop_on_signals(stop, at_once)
    endpoint = Endpoint(NAME, tmp_path / "s", refuse_seconds=refuse_seconds)
    async with serve_endpoint(endpoint, naming(b"", hold, arrived), lambda: 60.0, at_once=at_once) as (address,):
        running = asyncio.create_task(name_at(address))
        await arrived.acquire()
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        assert not at_once.is_set()
        asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGINT)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await running
    assert ended.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
