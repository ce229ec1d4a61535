"""CacheService over gRPC: checks requests, calls the store, turns errors into status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceServicer
from kvsidecar.errors import CACHE_DOMAIN, ArenaFull, InvalidRequest, KVSidecarError, abort, unary
from kvsidecar.layout import MAX_CHUNK_TOKENS

from cache_daemon.arena import Slot
from cache_daemon.session import Session
from cache_daemon.store import MAX_SALT_BYTES, ChunkStore, MatchResult, Reserved
from cache_daemon.store import Match as LeasedMatch

PROTOCOL_VERSION = 1
MESSAGE_BYTES = 1 << 20
MAX_PROBES = 4096
# More than a session can have skipped, and far from where the store's counters end.
MAX_SKIPPED = 1 << 48
_MISSED_HEARTBEATS = 3

log = structlog.get_logger("cache_daemon")
Context = grpc.aio.ServicerContext[Any, Any]


def _hash(name: str, value: bytes, *, optional: bool = False) -> bytes:
    if len(value) == keys.HASH_BYTES or (optional and not value):
        return value
    raise InvalidRequest(f"{name} has {len(value)} bytes; it must have {keys.HASH_BYTES}")


def _salt(value: bytes) -> bytes:
    if len(value) > MAX_SALT_BYTES:
        raise InvalidRequest(f"tenant_salt has {len(value)} bytes; at most {MAX_SALT_BYTES} are allowed")
    return value


class CacheService(CacheServiceServicer):
    """One instance per daemon; all methods run on its event loop."""

    def __init__(self, store: ChunkStore, heartbeat_ms: int) -> None:
        self._store = store
        self._heartbeat_ms = heartbeat_ms

    # ---- session --------------------------------------------------------------------------------------------

    async def Attach(
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Context
    ) -> AsyncIterator[pb.AttachResponse]:
        session: Session | None = None
        messages = aiter(request_iterator)
        patience = self._heartbeat_ms * _MISSED_HEARTBEATS / 1000
        try:
            async with asyncio.timeout(patience):
                first = await anext(messages, None)
            session = self._open(first)
            log.info("session opened", client=session.name, namespace=session.namespace.hex()[:12])
            yield pb.AttachResponse(welcome=self._welcome(session))
            while True:
                async with asyncio.timeout(patience):
                    message = await anext(messages, None)
                if message is None:
                    return
                self._note_skipped(session, message.heartbeat)
                verdict = self._store.verdict(session.namespace)
                yield pb.AttachResponse(heartbeat_ack=pb.HeartbeatAck(verdict=verdict))
        except KVSidecarError as error:
            await abort(context, error, CACHE_DOMAIN)
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"no heartbeat for {patience:.1f} s; attach again and send them"
            )
        finally:
            if session is not None:
                held = len(session.leases), len(session.reservations)
                self._store.close_session(session)
                log.info("session closed", client=session.name, leases_freed=held[0], reservations_freed=held[1])

    def _note_skipped(self, session: Session, beat: pb.Heartbeat) -> None:
        if max(beat.skipped_matches, beat.skipped_tokens) > MAX_SKIPPED:
            raise InvalidRequest(
                f"the heartbeat has skipped_matches {beat.skipped_matches} and skipped_tokens {beat.skipped_tokens}; "
                f"at most {MAX_SKIPPED} are allowed"
            )
        self._store.note_skipped(session, beat.skipped_matches, beat.skipped_tokens)

    def _open(self, message: pb.AttachRequest | None) -> Session:
        if message is None or message.WhichOneof("message") != "hello":
            raise InvalidRequest("the first message of Attach must be hello")
        hello = message.hello
        if hello.protocol_version != PROTOCOL_VERSION:
            raise InvalidRequest(f"protocol_version is {hello.protocol_version}; this daemon speaks {PROTOCOL_VERSION}")
        return self._store.open_session(hello.client_name, hello.descriptor, hello.namespace)

    def _welcome(self, session: Session) -> pb.Welcome:
        return pb.Welcome(
            epoch=self._store.epoch,
            session_id=session.id,
            arenas=[self._store.arena.describe()],
            heartbeat_interval_ms=self._heartbeat_ms,
            max_chunk_tokens=MAX_CHUNK_TOKENS,
            verdict=self._store.verdict(session.namespace),
            summary=self._store.summary.describe() if self._store.summary is not None else None,
        )

    # ---- reading --------------------------------------------------------------------------------------------

    @unary(CACHE_DOMAIN)
    async def Match(self, request: pb.MatchRequest, context: Context) -> pb.MatchResponse:
        salt = _salt(request.tenant_salt)
        if request.token_ids and request.prefix_hashes:
            raise InvalidRequest("token_ids and prefix_hashes are both set; set one of them")
        if not request.session_id:
            root = keys.tenant_root(_hash("namespace", request.namespace), salt)
            found = self._store.probe(root, request.token_ids)
            matches = [pb.ChunkMatch(header=c.header, matched_tokens=n) for c, n in found]
            return pb.MatchResponse(matches=matches, matched_tokens=sum(n for _, n in found))
        session = self._store.session(request.session_id)
        if request.prefix_hashes:
            chain = [_hash("prefix_hashes", h) for h in request.prefix_hashes]
            return self._matched(await self._store.match_chain(session, salt, chain))
        if len(request.contents) > MAX_PROBES:
            raise InvalidRequest(f"{len(request.contents)} content probes; at most {MAX_PROBES} are allowed")
        probes = [_stretch(probe, len(request.token_ids)) for probe in request.contents]
        return self._matched(await self._store.match(session, salt, request.token_ids, probes))

    @unary(CACHE_DOMAIN)
    async def SetVerdict(self, request: pb.SetVerdictRequest, context: Context) -> pb.SetVerdictResponse:
        session = self._store.session(request.session_id)
        verdict = request.verdict
        if not verdict.strategy or not 0 <= verdict.ratio <= 1:
            raise InvalidRequest(
                f"the verdict's strategy is {verdict.strategy!r} and its ratio {verdict.ratio}; "
                "a name and a number from 0 to 1 are needed"
            )
        self._store.set_verdict(session, verdict)
        log.info("verdict stored", namespace=session.namespace.hex()[:12], passed=verdict.passed)
        return pb.SetVerdictResponse()

    @unary(CACHE_DOMAIN)
    async def Acquire(self, request: pb.AcquireRequest, context: Context) -> pb.AcquireResponse:
        session = self._store.session(request.session_id)
        hashes = [_hash("prefix_hashes", h) for h in request.prefix_hashes]
        result = await self._store.acquire(session, _salt(request.tenant_salt), hashes)
        return pb.AcquireResponse(matches=self._matched(result).matches)

    @unary(CACHE_DOMAIN)
    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        session = self._store.session(request.session_id)
        return pb.ReleaseResponse(released=self._store.release(session, request.lease_ids))

    def _matched(self, result: MatchResult) -> pb.MatchResponse:
        return pb.MatchResponse(
            matches=[self._chunk_match(m) for m in result.matches],
            matched_tokens=sum(m.tokens for m in result.matches),
            promoted_tokens=result.promoted_tokens,
            promote_ms=result.promote_ms,
            contents=[pb.ContentMatch(start=start, match=self._chunk_match(m)) for start, m in result.contents],
        )

    def _chunk_match(self, match: LeasedMatch) -> pb.ChunkMatch:
        return pb.ChunkMatch(
            header=match.chunk.header,
            matched_tokens=match.tokens,
            slot=self._slot(match.chunk.slot) if match.chunk.slot else None,
            lease_id=match.lease_id,
        )

    def _slot(self, slot: Slot) -> pb.SlotRef:
        return pb.SlotRef(
            arena_id=slot.arena_id,
            offset=slot.offset,
            size_bytes=slot.size_bytes,
            epoch=self._store.epoch,
            generation=slot.generation,
        )

    # ---- writing --------------------------------------------------------------------------------------------

    @unary(CACHE_DOMAIN)
    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveResponse:
        session = self._store.session(request.session_id)
        for header in request.headers:
            _hash("parent_prefix_hash", header.parent_prefix_hash, optional=True)
        reserved = self._store.reserve(session, _salt(request.tenant_salt), request.headers)
        return pb.ReserveResponse(reservations=[self._reservation(r) for r in reserved])

    def _reservation(self, reserved: Reserved) -> pb.Reservation:
        return pb.Reservation(
            outcome=reserved.outcome,
            prefix_hash=reserved.prefix_hash,
            lease_id=reserved.lease_id,
            slot=self._slot(reserved.slot) if reserved.slot else None,
        )

    @unary(CACHE_DOMAIN)
    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitResponse:
        session = self._store.session(request.session_id)
        items = [(i.lease_id, i.checksum, i.epoch) for i in request.items]
        return pb.CommitResponse(committed=self._store.commit(session, items))

    @unary(CACHE_DOMAIN)
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        session = self._store.session(request.session_id)
        return pb.AbortResponse(aborted=self._store.abort(session, request.lease_ids))

    # ---- byte streams ---------------------------------------------------------------------------------------

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> AsyncIterator[pb.FetchResponse]:
        session: Session | None = None
        try:
            root = keys.tenant_root(_hash("namespace", request.namespace), _salt(request.tenant_salt))
            chunk = self._store.find(root, _hash("prefix_hash", request.prefix_hash))
            session = self._store.open_transient(request.namespace)
            result = await self._store.acquire(session, request.tenant_salt, [chunk.key])
            if not result.matches or result.matches[0].chunk.slot is None:
                raise ArenaFull("the chunk is stored, but the arena has no room to bring it in; try again later")
            yield pb.FetchResponse(header=chunk.header)
            view = self._store.arena.read(result.matches[0].chunk.slot)
            for at in range(0, len(view), MESSAGE_BYTES):
                yield pb.FetchResponse(data=bytes(view[at : at + MESSAGE_BYTES]))
        except KVSidecarError as error:
            await abort(context, error, CACHE_DOMAIN)
        finally:
            if session is not None:
                self._store.close_session(session)

    async def Store(self, request_iterator: AsyncIterator[pb.StoreRequest], context: Context) -> pb.StoreResponse:
        session: Session | None = None
        try:
            messages = aiter(request_iterator)
            first = await anext(messages, None)
            if first is None or first.WhichOneof("message") != "start":
                raise InvalidRequest("the first message of Store must be start")
            start = first.start
            session = self._store.open_session("store", start.descriptor, keys.namespace_id(start.descriptor))
            _hash("parent_prefix_hash", start.header.parent_prefix_hash, optional=True)
            reserved = self._store.reserve(session, _salt(start.tenant_salt), [start.header])[0]
            if reserved.outcome == pb.RESERVE_OUTCOME_ALREADY_STORED:
                return pb.StoreResponse(prefix_hash=reserved.prefix_hash, already_stored=True)
            if reserved.slot is None:
                raise _store_refusal(reserved.outcome)
            with self._store.arena.writing(reserved.slot) as target:
                await self._receive(messages, target)
            self._store.commit(session, [(reserved.lease_id, start.header.checksum, self._store.epoch)])
            return pb.StoreResponse(prefix_hash=reserved.prefix_hash)
        except KVSidecarError as error:
            await abort(context, error, CACHE_DOMAIN)
        finally:
            if session is not None:
                self._store.close_session(session)

    @staticmethod
    async def _receive(messages: AsyncIterator[pb.StoreRequest], target: memoryview) -> None:
        at = 0
        async for message in messages:
            data = message.data
            if len(data) > MESSAGE_BYTES:
                raise InvalidRequest(f"a data message has {len(data)} bytes; at most {MESSAGE_BYTES} are allowed")
            if at + len(data) > len(target):
                raise InvalidRequest(f"more than the announced {len(target)} payload bytes were sent")
            target[at : at + len(data)] = data
            at += len(data)
        if at != len(target):
            raise InvalidRequest(f"{at} payload bytes were sent, the header announced {len(target)}")

    # ---- keeping and removing -------------------------------------------------------------------------------

    @unary(CACHE_DOMAIN)
    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        return pb.PinResponse(chunks=self._pin(request.prefix, 1))

    @unary(CACHE_DOMAIN)
    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:
        return pb.UnpinResponse(chunks=self._pin(request.prefix, -1))

    def _pin(self, prefix: pb.PrefixRef, count: int) -> int:
        root = keys.tenant_root(_hash("namespace", prefix.namespace), _salt(prefix.tenant_salt))
        return self._store.pin(root, _hash("prefix_hash", prefix.prefix_hash), count)

    @unary(CACHE_DOMAIN)
    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteResponse:
        prefix = request.prefix
        namespace = _hash("namespace", prefix.namespace, optional=True)
        key = _hash("prefix_hash", prefix.prefix_hash, optional=True)
        if key and not namespace:
            raise InvalidRequest("prefix_hash is set without namespace; set both, or neither to delete everything")
        return pb.DeleteResponse(deleted=self._store.delete(namespace, _salt(prefix.tenant_salt), key))

    # ---- looking --------------------------------------------------------------------------------------------

    @unary(CACHE_DOMAIN)
    async def List(self, request: pb.ListRequest, context: Context) -> pb.ListResponse:
        if request.page_size > 1000:
            raise InvalidRequest(f"page_size is {request.page_size}; at most 1000 is allowed")
        size = request.page_size or 100
        namespace = _hash("namespace", request.namespace, optional=True)
        chunks = self._store.list_chunks(namespace, request.page_token, size + 1)
        more = chunks[size - 1].key if len(chunks) > size else b""
        return pb.ListResponse(chunks=[c.info() for c in chunks[:size]], next_page_token=more)

    @unary(CACHE_DOMAIN)
    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsResponse:
        return self._store.stats()

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.WatchResponse]:
        try:
            async for event in self._store.events.follow(request.epoch, request.after_sequence):
                yield event
        except KVSidecarError as error:
            await abort(context, error, CACHE_DOMAIN)


def _store_refusal(outcome: pb.ReserveOutcome.ValueType) -> KVSidecarError:
    match outcome:
        case pb.RESERVE_OUTCOME_ARENA_FULL:
            return ArenaFull("the arena has no room: everything in it is leased or pinned; try again later")
        case pb.RESERVE_OUTCOME_PARENT_MISSING:
            return InvalidRequest("parent_prefix_hash is not stored, or does not end where start_position begins")
        case _:
            return InvalidRequest("another session is writing this chunk now; try again later")


def _stretch(probe: pb.ContentProbe, prompt_tokens: int) -> tuple[int, int]:
    if not probe.tokens or probe.start + probe.tokens > prompt_tokens:
        raise InvalidRequest(
            f"a content probe has {probe.tokens} tokens from {probe.start}; "
            f"it must have at least 1 and lie within the {prompt_tokens} of token_ids"
        )
    return probe.start, probe.tokens
