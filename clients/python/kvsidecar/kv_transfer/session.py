"""One session with the daemon: leases, reservations, heartbeats and payload transfer."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from kvkernels import Payload

from kvsidecar.bloom_filter import BloomFilter
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.kv_transfer.transport import NoTransport, Transport, transfer_timeout

_ID_BYTES = 16
_CALL_SECONDS = 5.0


@dataclass(frozen=True)
class ServedCounts:
    """Tokens that a worker has served since it started.

    ``cached_tokens`` is the number of tokens that were not computed; ``pool_tokens`` of these were in the worker's own
    pool.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    pool_tokens: int = 0


@dataclass(frozen=True)
class CompletedLoad:
    """Tokens and payload bytes that a load copied, and the seconds of its lookup and copy."""

    tokens: int
    payload_bytes: int
    seconds: float

    def report(self, lease_id: bytes) -> pb.LoadReport:
        """Return the LoadReport about this load, which ran under the lease."""
        return pb.LoadReport(
            lease_id=lease_id,
            tokens=self.tokens,
            payload_bytes=self.payload_bytes,
            microseconds=round(self.seconds * 1e6),
        )


@dataclass(eq=False)
class Session:
    """One attachment to one epoch (start) of the daemon."""

    epoch: int
    id: bytes
    stub: CacheServiceStub
    heartbeat_seconds: float
    max_chunk_tokens: int
    verdict: pb.ReuseVerdict | None = None
    transport: Transport = field(default_factory=NoTransport)
    summary: BloomFilter | None = None  # Bloom filter over the daemon's index
    remote: bool = False  # the daemon has a remote tier, which the summary does not cover
    closed: threading.Event = field(default_factory=threading.Event)
    last_acked_at: float = field(default_factory=time.monotonic)  # when the last acknowledged heartbeat was sent
    suspected_at: float = 0.0  # when a call last timed out
    skipped_matches: int = 0
    skipped_tokens: int = 0
    served_before: ServedCounts = field(default_factory=ServedCounts)
    _heartbeat_due: threading.Event = field(default_factory=threading.Event)
    _sent_at: deque[float] = field(default_factory=deque)
    _pending_calls: set[Any] = field(default_factory=set)

    @property
    def alive(self) -> bool:
        return not self.closed.is_set()

    @property
    def leases_valid(self) -> bool:
        """Return whether payloads read a moment ago under a lease are valid.

        They are valid if the daemon cannot have ended the session before that, or if the transport verified each
        payload.
        """
        return self.alive and (
            not self.transport.zero_copy or time.monotonic() - self.last_acked_at < 2 * self.heartbeat_seconds
        )

    @property
    def responsive(self) -> bool:
        """Return whether the daemon has acknowledged a heartbeat since a call last timed out."""
        return self.alive and self.last_acked_at >= self.suspected_at

    def end(self) -> None:
        """Mark the session as closed and release its memory; views in use keep it mapped.

        This must be explicit: the traceback of a failed call may refer to this object until the next garbage
        collection, perhaps for hours. Until then, a dead daemon's arena would stay in memory.
        """
        self.finish()
        self.transport.close()
        self.summary = None

    # ---- leases ---------------------------------------------------------------------------------------------

    def match(self, request: pb.MatchRequest, timeout: float) -> pb.MatchResponse:
        """Call Match; release the lease of an answer that was lost. Raises grpc.RpcError."""
        request.lease_id = secrets.token_bytes(_ID_BYTES)
        try:
            return self.stub.Match(request, timeout=timeout)
        except grpc.RpcError as error:
            self._release_if_lost(request, error)
            raise

    def match_async(self, request: pb.MatchRequest, timeout: float) -> Callable[[], pb.MatchResponse]:
        """Send a Match now; return a function that waits for the answer. The caller must call it."""
        request.lease_id = secrets.token_bytes(_ID_BYTES)
        call = self.stub.Match.future(request, timeout=timeout)

        def answer() -> pb.MatchResponse:
            try:
                return call.result()
            except grpc.RpcError as error:
                self._release_if_lost(request, error)
                raise

        return answer

    def _release_if_lost(self, request: pb.MatchRequest, error: grpc.RpcError) -> None:
        """Release the lease of a lost answer.

        The daemon undoes a cancelled call that is in progress, but not a completed call.
        """
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            self.release([request.lease_id])

    def release(self, lease_ids: Sequence[bytes], load: CompletedLoad | None = None) -> None:
        """Release leases without waiting for the answer. Ignores empty ids.

        ``load`` was completed under the first lease; the daemon counts it.
        """
        held = [lease_id for lease_id in lease_ids if lease_id]
        if held:
            loads = [] if load is None else [load.report(held[0])]
            self._send_until_acked(
                self.stub.Release, pb.ReleaseRequest(session_id=self.id, lease_ids=held, loads=loads)
            )

    def store_verdict(self, verdict: pb.ReuseVerdict, timeout: float) -> None:
        """Store a verdict on approximate reuse with the session's namespace. Raises grpc.RpcError."""
        self.stub.SetVerdict(pb.SetVerdictRequest(session_id=self.id, verdict=verdict), timeout=timeout)

    # ---- reservations ---------------------------------------------------------------------------------------

    def reserve(self, request: pb.ReserveRequest, timeout: float) -> list[pb.Reservation]:
        """Call Reserve; abort the reservations of an answer that was lost. Raises grpc.RpcError."""
        request.reservation_ids.extend(secrets.token_bytes(_ID_BYTES) for _ in request.headers)
        try:
            return list(self.stub.Reserve(request, timeout=timeout).reservations)
        except grpc.RpcError:
            self.abort(request.reservation_ids)
            raise

    def commit(self, items: Sequence[pb.CommitItem], timeout: float) -> pb.CommitResponse:
        """Call Commit, which makes chunks visible. Raises grpc.RpcError.

        Aborts the chunks when the outcome is unknown.
        """
        request = pb.CommitRequest(session_id=self.id, epoch=self.epoch, items=items)
        try:
            return self.stub.Commit(request, timeout=timeout)
        except grpc.RpcError:
            self.abort([item.reservation_id for item in items])
            raise

    def abort(self, reservation_ids: Sequence[bytes], wait_seconds: float = 0.0) -> None:
        """Abort reservations; ignore ended reservations.

        Waits at most ``wait_seconds`` for the answer.
        """
        if not reservation_ids:
            return
        call = self._send_until_acked(
            self.stub.Abort, pb.AbortRequest(session_id=self.id, reservation_ids=reservation_ids)
        )
        if call is not None and wait_seconds:
            with suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                call.result(wait_seconds)

    def _send_until_acked(self, method: Any, request: Any) -> Any:
        """Call ``method``, and retry after timeouts while the session is open.

        Retries end with the session, because the daemon then frees everything. Returns the first call, or None if the
        session has ended.
        """
        if not self.alive:
            return None
        try:
            call = method.future(request, timeout=_CALL_SECONDS)
        except grpc.RpcError:  # the session ended meanwhile
            return None
        # Keep a reference, because gRPC cancels a call without references, and the lease would then stay until the
        # session ends.
        self._pending_calls.add(call)
        call.add_done_callback(lambda call: self._on_call_done(call, method, request))
        return call

    def _on_call_done(self, call: Any, method: Any, request: Any) -> None:
        self._pending_calls.discard(call)
        if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._send_until_acked(method, request)

    # ---- heartbeats -----------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Mark the session as closed: no more calls. Its memory stays mapped for current readers."""
        self.closed.set()
        self._heartbeat_due.set()

    def suspect(self) -> None:
        """Record that a call timed out, and send a heartbeat at once.

        ``responsive`` is False until that heartbeat is acknowledged.
        """
        self.suspected_at = time.monotonic()
        self._heartbeat_due.set()

    def wait_for_heartbeat(self) -> bool:
        """Wait until a heartbeat is due. Returns False when the session is closed."""
        self._heartbeat_due.wait(self.heartbeat_seconds)
        self._heartbeat_due.clear()
        return self.alive

    def next_heartbeat(self, served_counts: ServedCounts) -> pb.Heartbeat:
        """Return the heartbeat to send now."""
        self._sent_at.append(time.monotonic())
        before = self.served_before
        return pb.Heartbeat(
            skipped_matches=self.skipped_matches,
            skipped_tokens=self.skipped_tokens,
            prompts=served_counts.prompts - before.prompts,
            prompt_tokens=served_counts.prompt_tokens - before.prompt_tokens,
            cached_tokens=served_counts.cached_tokens - before.cached_tokens,
            pool_tokens=served_counts.pool_tokens - before.pool_tokens,
        )

    def record_ack(self, ack: pb.HeartbeatAck) -> None:
        """Record the acknowledgement of the oldest unacknowledged heartbeat.

        The time counts from the sending of that heartbeat, since the daemon may have received it at once.
        """
        if self._sent_at:
            self.last_acked_at = self._sent_at.popleft()
        if ack.HasField("verdict"):
            self.verdict = ack.verdict

    # ---- index summary --------------------------------------------------------------------------------------

    def may_contain(self, root: bytes, tokens: Sequence[int]) -> bool:
        """Return whether a prompt might begin with a stored chunk."""
        summary = self.summary
        return summary is None or summary.may_contain_prefix(root, tokens)

    def may_contain_content(self, root: bytes, tokens: Sequence[int]) -> bool:
        """Return whether these tokens might be stored as one chunk, in any context."""
        summary = self.summary
        return summary is None or summary.may_contain_content(root, tokens)

    def count_skipped_lookup(self, tokens: int) -> None:
        """Count a prompt that was not looked up because the summary contains none of its chunks."""
        self.skipped_matches += 1
        self.skipped_tokens += tokens

    # ---- payloads -------------------------------------------------------------------------------------------

    def read(
        self, lease_id: bytes, matches: Sequence[pb.ChunkMatch], timeout: float, most: float = float("inf")
    ) -> Generator[Payload, None, None]:
        """Yield payloads; see ``Transport.read``.

        ``timeout`` (seconds) limits an empty transfer; larger transfers get more time, but at most ``most`` seconds.
        """
        size = sum(match.payload_bytes for match in matches)
        return self.transport.read(lease_id, matches, min(transfer_timeout(size, timeout), most))
