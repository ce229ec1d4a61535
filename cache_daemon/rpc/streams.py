"""Fetch, Store and Watch: byte streams for callers that share no memory, and the event stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import (
    ArenaFull,
    ChecksumMismatch,
    Context,
    DeadlineExceeded,
    InvalidRequest,
    KVSidecarError,
    Overloaded,
    QuotaExceeded,
)

from cache_daemon.memory.arena import Slot
from cache_daemon.rpc import limits
from cache_daemon.rpc.calls import streaming, unary
from cache_daemon.rpc.decoding import decoded
from cache_daemon.rpc.door import AtDoor
from cache_daemon.store.sessions import Session

# A stream that stands still so long gives back what it holds.
STALL_SECONDS = 10.0


class Streams(AtDoor):
    """Each holds at most one chunk, and not for longer than its caller takes or sends something."""

    @streaming
    async def Fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[pb.FetchResponse]:
        root = self.root(context, request.namespace, request.tenant_salt)
        chunk = self.store.find(root, limits.hash_of("prefix_hash", request.prefix_hash))
        with self.stream("Fetch", limits.MAX_STREAMS):
            async with self.store.reading(chunk) as payload:
                await _written(context, pb.FetchResponse(header=chunk.whole_header()))
                for at in range(0, len(payload), limits.MESSAGE_BYTES):
                    piece = pb.FetchResponse(data=bytes(payload[at : at + limits.MESSAGE_BYTES]))
                    await _written(context, piece)
        return
        yield  # what makes it a generator: answers are written with a deadline above

    @unary
    async def Store(self, request_iterator: AsyncIterator[pb.StoreRequest], context: Context) -> pb.StoreResponse:
        messages = aiter(request_iterator)
        first = await _next(messages)
        if first is None or first.WhichOneof("message") != "start":
            raise InvalidRequest("the first message of Store must be start")
        start = first.start
        salt = self.salt(context, start.tenant_salt)
        limits.check_descriptor(start.descriptor)
        limits.check_headers([start.header])
        with self.stream("Store", limits.MAX_STREAMS):
            session = self.store.open_session(
                "store", start.descriptor, keys.namespace_id(start.descriptor), listed=False
            )
            try:
                return await self._store(session, salt, start.header, messages)
            finally:
                self.store.close_session(session)

    async def _store(
        self, session: Session, salt: bytes, header: Any, messages: AsyncIterator[pb.StoreRequest]
    ) -> pb.StoreResponse:
        with self.store.staged(session, salt, header) as reserved:
            if reserved.outcome == pb.RESERVE_OUTCOME_ALREADY_STORED:
                return pb.StoreResponse(prefix_hash=reserved.prefix_hash, already_stored=True)
            if reserved.staged is None:
                raise _not_reserved(reserved.outcome)
            await _receive(messages, session, reserved.staged)
            items = [(reserved.reservation_id, header.checksum)]
            outcome = (await self.store.commit(session, self.store.epoch, items))[0]
        if outcome != pb.COMMIT_OUTCOME_COMMITTED:
            raise _not_committed(outcome)
        return pb.StoreResponse(prefix_hash=reserved.prefix_hash)

    @streaming
    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        root = b""
        if request.namespace:
            root = self.root(context, request.namespace, request.tenant_salt)
        else:
            self.principal_of(context).require_operator("watch all tenants")
        with self.stream("Watch", limits.MAX_WATCHERS):
            events = self.store.events
            async for event in events.follow(
                request.epoch, request.after_sequence, root, with_tokens=request.with_tokens
            ):
                yield event


async def _written(context: Context, answer: pb.FetchResponse) -> None:
    try:
        async with asyncio.timeout(STALL_SECONDS):
            await context.write(answer)
    except TimeoutError:
        raise DeadlineExceeded(f"the caller took nothing for {STALL_SECONDS:g} s; fetch the chunk again") from None


async def _next(messages: AsyncIterator[pb.StoreRequest]) -> pb.StoreRequest | None:
    try:
        async with asyncio.timeout(STALL_SECONDS):
            return decoded(await anext(messages, None))
    except TimeoutError:
        raise DeadlineExceeded(f"the caller sent nothing for {STALL_SECONDS:g} s; store the chunk again") from None


async def _receive(messages: AsyncIterator[pb.StoreRequest], session: Session, staged: Slot) -> None:
    assert session.staging is not None
    at = 0
    while (message := await _next(messages)) is not None:
        data = message.data
        limits.at_most("the size of a data message in bytes", len(data), limits.MESSAGE_BYTES)
        if at + len(data) > staged.size_bytes:
            raise InvalidRequest(f"more than the announced {staged.size_bytes} payload bytes were sent")
        with session.staging.view(Slot(staged.offset + at, len(data))) as target:
            target[:] = data
        at += len(data)
    if at != staged.size_bytes:
        raise InvalidRequest(f"{at} payload bytes were sent, the header announced {staged.size_bytes}")


def _not_reserved(outcome: pb.ReserveOutcome.ValueType) -> KVSidecarError:
    match outcome:
        case pb.RESERVE_OUTCOME_PARENT_MISSING:
            return InvalidRequest("parent_prefix_hash is not stored, or does not end where start_position begins")
        case pb.RESERVE_OUTCOME_IN_PROGRESS:
            return Overloaded("another session is writing this chunk now; try again later")
        case _:
            return InvalidRequest("the chunk is larger than the staging memory, the arena or the tenant's quota")


def _not_committed(outcome: pb.CommitOutcome.ValueType) -> KVSidecarError:
    match outcome:
        case pb.COMMIT_OUTCOME_CHECKSUM_MISMATCH:
            return ChecksumMismatch("the bytes received do not have the header's checksum; the chunk was discarded")
        case pb.COMMIT_OUTCOME_PARENT_MISSING:
            return InvalidRequest("the parent was evicted meanwhile; store it first")
        case pb.COMMIT_OUTCOME_QUOTA_EXCEEDED:
            return QuotaExceeded("the tenant's quota is used up by chunks that cannot go now")
        case _:
            return ArenaFull("the arena has no room: all in it is leased, pinned or being written; try again later")
