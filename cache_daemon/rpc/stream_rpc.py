"""Stream RPCs: Fetch, Store, Fill and Watch for callers without shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.errors import (
    ArenaFull,
    ChecksumMismatch,
    Context,
    DeadlineExceeded,
    InvalidRequest,
    KVSidecarError,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    UnknownLease,
)
from kvsidecar.payload_wire import encode_data

from cache_daemon.memory.arena import Slot
from cache_daemon.rpc import caller_budgets, request_validation
from cache_daemon.rpc.call_wrapper import streaming, unary
from cache_daemon.rpc.request_decoder import decode_request
from cache_daemon.rpc.servicer_base import ServicerBase
from cache_daemon.store.prompt_hints import PromptHints
from cache_daemon.store.sessions import Session

# A stream without progress for this long is aborted, which releases its leases.
STREAM_TIMEOUT_SECONDS = 10.0

T = TypeVar("T")
M = TypeVar("M", pb.StoreRequest, pb.FillRequest)


class StreamServicer(ServicerBase):
    """Byte streams and the event stream.

    A call leases its chunk, or the chunks of its lease id, only while its client sends or receives.
    """

    @streaming
    async def Fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[pb.FetchResponse]:
        if request.session_id:
            await self._fetch_leased(request, context)
            return
        key = request_validation.check_hash("prefix_hash", request.prefix_hash)
        if request.root:
            self.principal_of(context).require_operator("name a tenant by its root")
            chunk = self.store.find(request_validation.check_hash("root", request.root), key)
            reading = self.store.reader.unchanged(chunk)
        else:
            chunk = self.store.find(self.root(context, request.namespace, request.tenant_salt), key)
            caller = self.external_caller(context)
            reading = self.store.reader.promoted(chunk, None if caller is None else self.sessions.leased_by(caller))
        with self.stream(context, "Fetch", caller_budgets.STREAMS):
            async with reading as payload:
                await _send(context, chunk.full_header(), payload)
        return
        yield  # makes this a generator; the responses themselves are written with a deadline

    async def _fetch_leased(self, request: pb.FetchRequest, context: Context) -> None:
        session = self.session(context, request.session_id)
        request_validation.check_max(
            "the number of prefix_hashes", len(request.prefix_hashes), request_validation.MAX_ITEMS
        )
        chunks = session.leased_chunks(request.lease_id, request.prefix_hashes)
        with self.stream(context, "Fetch", caller_budgets.STREAMS), self.store.acquire(session, chunks):
            for chunk in chunks:
                self.session(context, request.session_id)  # raises when the session has ended or lost its rights
                await _send(context, chunk.header, await self.store.reader.leased(chunk))

    @unary
    async def Store(self, request_iterator: AsyncIterator[pb.StoreRequest], context: Context) -> pb.StoreResponse:
        messages = aiter(request_iterator)
        with self.stream(context, "Store", caller_budgets.STREAMS):
            start = (await _first(messages, "Store", "start")).start
            salt = self.salt(context, start.tenant_salt)
            request_validation.check_descriptor(start.descriptor)
            request_validation.check_headers([start.header])
            hints = PromptHints(self.store.ttl.deadline_of(request_validation.check_ttl(start.ttl_seconds)))
            session = self.store.open_session(
                "store", start.descriptor, keys.namespace_id(start.descriptor),
                shares_memory=False, owner=self.principal_of(context), listed=False,
            )  # fmt: skip
            try:
                return await self._store(session, salt, start.header, hints, messages)
            finally:
                self.store.close_session(session)

    async def _store(
        self, session: Session, salt: bytes, header: Any, hints: PromptHints, messages: AsyncIterator[pb.StoreRequest]
    ) -> pb.StoreResponse:
        with self.store.scoped_reservation(session, salt, header, hints) as reserved:
            if reserved.outcome == pb.RESERVE_OUTCOME_ALREADY_STORED:
                return pb.StoreResponse(prefix_hash=reserved.prefix_hash, already_stored=True)
            if reserved.staged is None:
                raise _reserve_error(reserved.outcome)
            upload = _PayloadUpload(session, reserved.reservation_id)
            while (message := await _next(messages)) is not None:
                upload.take(message.data)
            upload.check_complete()
            items = [(reserved.reservation_id, header.checksum)]
            outcome = (await self.store.commit(session, self.store.epoch, items))[0]
        if outcome != pb.COMMIT_OUTCOME_COMMITTED:
            raise _commit_error(outcome)
        return pb.StoreResponse(prefix_hash=reserved.prefix_hash)

    @unary
    async def Fill(self, request_iterator: AsyncIterator[pb.FillRequest], context: Context) -> pb.FillResponse:
        messages = aiter(request_iterator)
        filled: list[_PayloadUpload] = []
        with self.stream(context, "Fill", caller_budgets.STREAMS):
            session = self.session(context, (await _first(messages, "Fill", "session_id")).session_id)
            while (message := await _next(messages)) is not None:
                if message.WhichOneof("message") == "reservation_id":
                    if filled:
                        filled[-1].check_complete()
                    filled.append(_PayloadUpload(session, message.reservation_id))
                elif not filled:
                    raise InvalidRequest("a payload has no reservation; send its reservation_id first")
                else:
                    filled[-1].take(message.data)
            if filled:
                filled[-1].check_complete()
        return pb.FillResponse(filled=len(filled))

    @streaming
    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        # ``principal_of`` compares all tokens of the tenants file: too slow for each event.
        root, caller, num_reloads = b"", self.principal_of(context), self.store.accounts.num_reloads
        if request.namespace:
            root = self.root(context, request.namespace, request.tenant_salt)
        else:
            caller.require_operator("watch all tenants")
        with self.stream(context, "Watch", caller_budgets.WATCHERS):
            async for event in self.events.follow(
                request.epoch, request.after_sequence, root, with_tokens=request.with_tokens
            ):
                if self.store.accounts.num_reloads != num_reloads:
                    num_reloads = self.store.accounts.num_reloads
                    if self.principal_of(context) != caller:
                        raise PermissionDenied(f"the rights of {caller.name} changed; call Watch again")
                yield event


async def _send(context: Context, header: ChunkHeader, payload: memoryview) -> None:
    await _written(context, pb.FetchResponse(header=header))
    for at in range(0, len(payload), request_validation.MESSAGE_BYTES):
        await _written(context, encode_data(payload[at : at + request_validation.MESSAGE_BYTES]))


async def _written(context: Context, answer: pb.FetchResponse | bytes) -> None:
    try:
        async with asyncio.timeout(STREAM_TIMEOUT_SECONDS):
            await context.write(answer)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the caller took nothing for {STREAM_TIMEOUT_SECONDS:g} s; fetch the chunk again"
        ) from None


async def _first(messages: AsyncIterator[M], call: str, field: str) -> M:
    """Return the first message of a stream. Raises InvalidRequest if it is missing or lacks ``field``."""
    message = await _next(messages)
    if message is None or message.WhichOneof("message") != field:
        raise InvalidRequest(f"the first message of {call} must be {field}")
    return message


async def _next(messages: AsyncIterator[T]) -> T | None:
    try:
        async with asyncio.timeout(STREAM_TIMEOUT_SECONDS):
            return await decode_request(await anext(messages, None))
    except TimeoutError:
        raise DeadlineExceeded(f"the caller sent nothing for {STREAM_TIMEOUT_SECONDS:g} s; send it again") from None


class _PayloadUpload:
    """A payload that arrives in the staging memory of its session.

    Raises UnknownLease when the reservation ends meanwhile.
    """

    def __init__(self, session: Session, reservation_id: bytes) -> None:
        self._session, self._id, self._at = session, reservation_id, 0
        self._size = self._place().size_bytes

    def take(self, data: bytes) -> None:
        """Append bytes. Raises InvalidRequest for more bytes than announced, and for a message that is too large."""
        request_validation.check_max("the size of a data message in bytes", len(data), request_validation.MESSAGE_BYTES)
        if self._at + len(data) > self._size:
            raise InvalidRequest(f"more than the announced {self._size} payload bytes were sent")
        staging, place = self._session.staging, Slot(self._place().offset + self._at, len(data))
        assert staging is not None, "a session with reservations has staging"
        with staging.view(place) as target:
            target[:] = data
        self._at += len(data)

    def check_complete(self) -> None:
        """Raise InvalidRequest when fewer bytes arrived than announced."""
        if self._at != self._size:
            raise InvalidRequest(f"{self._at} payload bytes were sent, the header announced {self._size}")

    def _place(self) -> Slot:
        reservation = self._session.reservations.get(self._id)
        if reservation is None:
            raise UnknownLease("the reservation is not one of this session's, or has ended; reserve the chunk again")
        return reservation.staged


def _reserve_error(outcome: pb.ReserveOutcome.ValueType) -> KVSidecarError:
    match outcome:
        case pb.RESERVE_OUTCOME_PARENT_MISSING:
            return InvalidRequest("parent_prefix_hash is not stored, or does not end where start_position begins")
        case pb.RESERVE_OUTCOME_IN_PROGRESS:
            return Overloaded("another session is writing this chunk now; try again later")
        case pb.RESERVE_OUTCOME_STAGING_FULL:
            return Overloaded("other calls of this caller use up the memory that it may write into; try again later")
        case _:
            return InvalidRequest("the chunk is larger than the staging memory, the arena or the tenant's quota")


def _commit_error(outcome: pb.CommitOutcome.ValueType) -> KVSidecarError:
    match outcome:
        case pb.COMMIT_OUTCOME_CHECKSUM_MISMATCH:
            return ChecksumMismatch("the bytes received do not have the header's checksum; the chunk was discarded")
        case pb.COMMIT_OUTCOME_PARENT_MISSING:
            return InvalidRequest("the parent was evicted meanwhile; store it first")
        case pb.COMMIT_OUTCOME_QUOTA_EXCEEDED:
            return QuotaExceeded("the tenant's quota is used up by chunks that cannot go now")
        case _:
            return ArenaFull("the arena has no room: all in it is leased, pinned or being written; try again later")
