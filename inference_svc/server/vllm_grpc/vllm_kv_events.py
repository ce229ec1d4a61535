"""KV events of vLLM's contract: stored and removed blocks of the model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.errors import from_rpc
from kvsidecar.events.block_hashes import DEFAULT_SEED
from kvsidecar.events.block_ledger import ARENA, BlockLedger
from kvsidecar.events.event_follower import EventFollower
from kvsidecar.events.vllm_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvsidecar.net.channel import ServiceAddress
from smg_grpc_proto.generated import common_pb2 as common

from inference_svc.kv_pool.block_table import PAGE_TOKENS

# Maximum unread batches of a subscriber. With that many, the daemon's events wait, and the daemon limits what it keeps.
_MAX_UNREAD = 256
_CLOSED_POLL_SECONDS = 1.0
_Update = list[Event] | Exception | None


async def kv_event_batches(
    address: ServiceAddress, namespace: bytes, after: int, stop: asyncio.Event
) -> AsyncGenerator[common.KvEventBatch, None]:
    """Yield all blocks of the default tenant in a namespace, then changes, until ``stop``.

    Batches are numbered from ``after`` + 1. Raises a KVSidecarError if the daemon refuses the worker.
    """
    loop, told = asyncio.get_running_loop(), asyncio.Queue[_Update]()
    room, closed = threading.Semaphore(_MAX_UNREAD), threading.Event()

    def tell(events: _Update) -> None:
        while not room.acquire(timeout=_CLOSED_POLL_SECONDS) and not closed.is_set():
            pass
        if not closed.is_set() and not loop.is_closed():
            loop.call_soon_threadsafe(told.put_nowait, events)

    @contextmanager
    def reach() -> Iterator[Any]:
        with address.channel() as channel:
            try:
                yield CacheServiceStub(channel)
            except grpc.RpcError as error:
                raise from_rpc(error) from error

    scope = {"namespace": namespace, "tenant_salt": b""}
    follower = EventFollower(reach, scope, BlockLedger(PAGE_TOKENS, b"", DEFAULT_SEED))

    def follow() -> None:
        try:
            follower.run(tell)
        except Exception as error:
            tell(error)

    threading.Thread(target=follow, name="kv-events", daemon=True).start()
    stopping = asyncio.ensure_future(stop.wait())
    stopping.add_done_callback(lambda _: told.put_nowait(None))
    try:
        while (events := await told.get()) is not None:
            room.release()
            if isinstance(events, Exception):
                raise events
            if events:
                after += 1
                yield _batch(after, events)
    finally:
        stopping.cancel()
        closed.set()
        follower.close()


def _batch(number: int, events: list[Event]) -> common.KvEventBatch:
    return common.KvEventBatch(
        sequence_number=number,
        timestamp=time.time(),
        events=[_event(number, event) for event in events],
        dp_rank=0,
    )


def _event(number: int, event: Event) -> common.KvCacheEvent:
    if isinstance(event, AllBlocksCleared):
        return common.KvCacheEvent(event_id=number, cleared=common.KvCacheCleared())
    place = {
        "tier": common.KV_CACHE_TIER_HOST if event.medium == ARENA else common.KV_CACHE_TIER_DISK,
        "medium": event.medium,
        "locality": common.KV_CACHE_LOCALITY_LOCAL,
    }
    level = 1 if event.medium == ARENA else 2
    if isinstance(event, BlockRemoved):
        gone = [_signed(name) for name in event.block_hashes]
        return common.KvCacheEvent(
            event_id=number, removed=common.KvBlocksRemoved(block_hashes=gone, cache_level=level, **place)
        )
    return common.KvCacheEvent(
        event_id=number,
        stored=common.KvBlocksStored(
            blocks=_blocks(event, level),
            parent_block_hash=None if event.parent_block_hash is None else _signed(event.parent_block_hash),
            **place,
        ),
    )


def _blocks(event: BlockStored, level: int) -> list[common.KvBlock]:
    size = event.block_size
    return [
        common.KvBlock(
            block_hash=_signed(name),
            token_ids=event.token_ids[i * size : (i + 1) * size],
            block_size=size,
            cache_level=level,
        )
        for i, name in enumerate(event.block_hashes)
    ]


def _signed(name: int) -> int:
    """Convert a block hash to the contract's int64, with the same 64 bits."""
    return name - (1 << 64) if name >> 63 else name
