"""Session RPCs: Attach and SetVerdict."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import structlog
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.chunk_layout import MAX_CHUNK_TOKENS
from kvsidecar.errors import Context, InvalidRequest, PermissionDenied
from kvsidecar.protocol_versions import SPOKEN, ProtocolVersions

from cache_daemon.rpc import caller_budgets, request_validation
from cache_daemon.rpc.call_wrapper import abort_call, unary
from cache_daemon.rpc.heartbeats import Heartbeats, check_totals
from cache_daemon.rpc.servicer_base import ServicerBase
from cache_daemon.store.sessions import Session

log = structlog.get_logger("cache_daemon")


class SessionServicer(ServicerBase):
    """Sessions and reuse verdicts.

    A session lives as long as its Attach stream; missing heartbeats end both.
    """

    async def Attach(
        self, request_iterator: AsyncIterator[pb.AttachRequest], context: Context
    ) -> AsyncIterator[pb.AttachResponse]:
        session: Session | None = None
        heartbeats = Heartbeats(request_iterator, self.shared.heartbeat_ms)
        try:
            with self.stream(context, "Attach", caller_budgets.SESSIONS):  # until it has a session, which counts itself
                hello = await heartbeats.receive()
            session, version = self._open(hello, context)
            log.info("session opened", client=session.name, namespace=session.namespace.hex()[:12])
            yield pb.AttachResponse(welcome=self._welcome(session, version))
            while True:
                message = await heartbeats.receive()
                if message is None:
                    return
                if self.principal_of(context) != session.owner:  # a revoked token ends the session
                    raise PermissionDenied("what the caller may do has changed; call Attach again")
                totals = check_totals(message.heartbeat, session.heartbeat_totals)
                session.record_heartbeat(totals, self.store.counters)
                verdict = self.verdicts.get(session.namespace)
                yield pb.AttachResponse(heartbeat_ack=pb.HeartbeatAck(verdict=verdict))
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                f"no heartbeat for {heartbeats.timeout_seconds:.1f} s; attach again and send them",
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

    def _open(self, message: pb.AttachRequest | None, context: Context) -> tuple[Session, int]:
        """Return the new session and its protocol version."""
        if message is None or message.WhichOneof("message") != "hello":
            raise InvalidRequest("the first message of Attach must be hello")
        hello = message.hello
        version = SPOKEN.common(_versions(hello))
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
        session = self.store.open_session(
            name, hello.descriptor, hello.namespace, shares_memory=self.private, owner=principal
        )
        self.store.misses.describe(session.namespace, session.descriptor)
        self.shared.reuse.attach(session, hello.engine)
        return session, version

    def _welcome(self, session: Session, version: int) -> pb.Welcome:
        welcome = pb.Welcome(
            protocol_version=version,
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


def _versions(hello: pb.Hello) -> ProtocolVersions:
    """Return the versions that a worker speaks. Raises InvalidRequest."""
    oldest = hello.protocol_version
    newest = hello.newest_protocol_version or oldest
    if not 1 <= oldest <= newest:
        raise InvalidRequest(
            f"protocol_version is {oldest} and newest_protocol_version {newest}; they must be at least 1, in this order"
        )
    return ProtocolVersions(oldest, newest)
