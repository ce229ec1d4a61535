"""Subscriptions to KV events whose reader is slow, or reads nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("smg_grpc_proto.generated.common_pb2", reason="needs kvsidecar[vllm-grpc]")

from kvsidecar.events.vllm_events import BlockRemoved, Event
from kvsidecar.net.channel import ServiceAddress

from inference_svc.server.vllm_grpc import vllm_kv_events

BATCHES = 5000


class Follower:
    """Publishes a removal in each batch, as fast as it may."""

    def __init__(self, *_: object) -> None:
        self.published, self._closed = 0, threading.Event()
        self.ended = threading.Event()
        made.append(self)

    def run(self, publish: Callable[[list[Event]], None]) -> None:
        for i in range(BATCHES):
            if self._closed.is_set():
                break
            publish([BlockRemoved(block_hashes=[i], medium="GPU")])
            self.published += 1
        self.ended.set()

    def close(self) -> None:
        self._closed.set()


made: list[Follower] = []


@pytest.fixture(autouse=True)
def following(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    monkeypatch.setattr(vllm_kv_events, "EventFollower", Follower)


async def test_events_wait_for_a_subscriber_that_does_not_read(tmp_path: Path) -> None:
    stop = asyncio.Event()
    batches = vllm_kv_events.kv_event_batches(ServiceAddress(tmp_path / "s"), b"n", 7, stop)
    first = await anext(batches)
    await asyncio.sleep(0.5)
    assert made[0].published <= vllm_kv_events._MAX_UNREAD + 1
    found = [first] + [await anext(batches) for _ in range(BATCHES - 1)]
    assert [batch.sequence_number for batch in found] == list(range(8, 8 + BATCHES))
    assert [batch.events[0].removed.block_hashes[0] for batch in found] == list(range(BATCHES))
    await batches.aclose()


async def test_a_follower_that_waits_ends_with_its_subscriber(tmp_path: Path) -> None:
    batches = vllm_kv_events.kv_event_batches(ServiceAddress(tmp_path / "s"), b"n", 0, asyncio.Event())
    await anext(batches)
    await asyncio.sleep(0.2)
    await batches.aclose()
    assert await asyncio.to_thread(made[0].ended.wait, 20)
    assert made[0].published < BATCHES
