"""Session RPCs: Attach with its heartbeats, and SetVerdict."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import structlog
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.chunk_layout import MAX_CHUNK_TOKENS
from kvsidecar.errors import Context, InvalidRequest, PermissionDenied

from cache_daemon.rpc import caller_budgets, request_validation
from cache_daemon.rpc.call_wrapper import abort_call, unary
from cache_daemon.rpc.request_decoder import decode_request
from cache_daemon.rpc.servicer_base import ServicerBase
from cache_daemon.store.sessions import Session

PROTOCOL_VERSION = 2
_MISSED_HEARTBEATS = 3
# Lower bound for short heartbeat intervals: a client that waits for a busy CPU is alive.
_MIN_HEARTBEAT_TIMEOUT_SECONDS = 2.0

log = structlog.get_logger("cache_daemon")


class SessionServicer(ServicerBase):
    """Sessions and reuse verdicts.

    A session lives as long as its Attach stream; a missing heartbeat ends it.
    """

    async def Attach(
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Context
    ) -> AsyncIterator[pb.AttachResponse]:
        session: Session | None = None
        messages = aiter(request_iterator)
        patience = max(self.shared.heartbeat_ms * _MISSED_HEARTBEATS / 1000, _MIN_HEARTBEAT_TIMEOUT_SECONDS)
        try:
            async with asyncio.timeout(patience):
                first = await decode_request(await anext(messages, None))
            session = self._open(first, context)
            log.info("session opened", client=session.name, namespace=session.namespace.hex()[:12])
            yield pb.AttachResponse(welcome=self._welcome(session))
            while True:
                async with asyncio.timeout(patience):
                    message = await decode_request(await anext(messages, None))
                if message is None:
                    return
                if self.principal_of(context) != session.owner:  # a revoked token ends the session
                    raise PermissionDenied("what the caller may do has changed; call Attach again")
                self.store.record_heartbeat(
                    session, request_validation.check_heartbeat(message.heartbeat, session.heartbeat_totals)
                )
                verdict = self.verdicts.get(session.namespace)
                yield pb.AttachResponse(heartbeat_ack=pb.HeartbeatAck(verdict=verdict))
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"no heartbeat for {patience:.1f} s; attach again and send them"
            )
        except Exception as error:
            self.calls.count("Attach", error)
            await abort_call("Attach", error, context)
            raise
        finally:
            if session is not None:
                held = len(session.leases), len(session.reservations)
                self.store.close_session(session)
                log.info("session closed", client=session.name, leases_freed=held[0], reservations_freed=held[1])

    def _open(self, message: pb.AttachRequest | None, context: Context) -> Session:
        if message is None or message.WhichOneof("message") != "hello":
            raise InvalidRequest("the first message of Attach must be hello")
        hello = message.hello
        if hello.protocol_version != PROTOCOL_VERSION:
            raise InvalidRequest(f"protocol_version is {hello.protocol_version}; this daemon speaks {PROTOCOL_VERSION}")
        name = request_validation.check_client_name(hello.client_name)
        request_validation.check_descriptor(hello.descriptor)
        principal, open_now = self.principal_of(context), list(self.sessions)
        external = [session.owner for session in open_now if not session.shares_memory]
        caller_budgets.SESSIONS.check(
            "sessions",
            len(open_now),
            len(external),
            sum(owner == principal for owner in external),
            private=self.private,
        )
        return self.store.open_session(
            name, hello.descriptor, hello.namespace, shares_memory=self.private, owner=principal
        )

    def _welcome(self, session: Session) -> pb.Welcome:
        welcome = pb.Welcome(
            epoch=self.store.epoch,
            session_id=session.id,
            heartbeat_interval_ms=self.shared.heartbeat_ms,
            max_chunk_tokens=MAX_CHUNK_TOKENS,
            verdict=self.verdicts.get(session.namespace),
            remote=self.store.has_remote_tier,
        )
        assert session.staging is not None, "a new session has one"
        welcome.staging.size_bytes = session.staging.size_bytes
        if session.shares_memory:
            welcome.memory_socket = self.memory_socket
            self.store.describe_memory(welcome)
        return welcome

    @unary
    async def SetVerdict(self, request: pb.SetVerdictRequest, context: Context) -> pb.SetVerdictResponse:
        session = self.session(context, request.session_id)
        verdict = request.verdict
        if not verdict.strategy or not 0 <= verdict.ratio <= 1:
            raise InvalidRequest(
                f"the verdict's strategy is {verdict.strategy!r} and its ratio {verdict.ratio}; "
                "a name and a number from 0 to 1 are needed"
            )
        request_validation.check_max(
            "the length of the verdict in bytes", verdict.ByteSize(), request_validation.MAX_STRING_BYTES
        )
        self.principal_of(context).require_operator("store a verdict, which all tenants of the model follow")
        await self.verdicts.put(session.namespace, verdict)
        log.info("verdict stored", namespace=session.namespace.hex()[:12], passed=verdict.passed)
        return pb.SetVerdictResponse()
