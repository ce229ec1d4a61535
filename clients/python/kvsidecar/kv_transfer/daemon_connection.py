"""Keeps a session with the cache daemon open, and reconnects after failures."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, cast

import grpc

from kvsidecar import keys
from kvsidecar.bloom_filter import BloomFilter
from kvsidecar.byte_sizes import format_size
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor
from kvsidecar.errors import ConfigurationError, Unavailable, from_rpc
from kvsidecar.kv_transfer.mapped_memory import map_summary
from kvsidecar.kv_transfer.session import ServedCounts, Session
from kvsidecar.kv_transfer.session_channel import SessionChannel
from kvsidecar.kv_transfer.shared_memory_transport import SharedMemoryTransport
from kvsidecar.kv_transfer.stream_transport import StreamTransport
from kvsidecar.net.channel import ServiceAddress
from kvsidecar.protocol_versions import SPOKEN

CONNECT_SECONDS, _RELEASE_SECONDS = 2.0, 30.0
_FIRST_BACKOFF, _LAST_BACKOFF = 0.05, 2.0
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]
# Errors of a lack of threads or memory, and of a GPU that refuses a mapping: a later attempt may succeed.
_LACKING = (RuntimeError, MemoryError, OSError)
_Outgoing = queue.SimpleQueue[pb.AttachRequest | None]


class Logger(Protocol):
    """A logger of the standard library or of structlog."""

    def info(self, text: str, /) -> Any: ...

    def warning(self, text: str, /) -> Any: ...


class DaemonConnection:
    """Attaches to the daemon on its own thread; ``session`` is None while detached."""

    def __init__(
        self,
        address: ServiceAddress,
        name: str,
        descriptor: NamespaceDescriptor,
        gpu: int | None = None,
        *,
        maps: bool = True,
        engine: str = "kvsidecar",
        log: Logger | None = None,
    ) -> None:
        """Create the connection; ``gpu`` is the CUDA device that reads chunks, if any.

        ``engine`` is the engine's name in the daemon's metrics. The session reads payloads in shared memory if the
        daemon offers it; otherwise it streams them over TCP. With ``maps=False`` the session only looks up and leases;
        it can neither read nor write payloads.
        """
        self._log = log or logging.getLogger(__name__)
        self._address, self._name, self.descriptor, self._gpu = address, name, descriptor, gpu
        self._maps, self._engine = maps, engine
        self.namespace = keys.namespace_id(descriptor)
        self.served_counts: Callable[[], ServedCounts] = ServedCounts  # reported in heartbeats; set by the runtime
        self.default_verdict: pb.ReuseVerdict | None = None  # for sessions without a verdict in the daemon
        self._session: Session | None = None
        self._stop = threading.Event()
        self._current: Session | None = None
        self._changed = threading.Condition()
        self._logged = ""
        self._thread = threading.Thread(target=self._run, name="kv-session", daemon=True)
        self._thread.start()

    @property
    def session(self) -> Session | None:
        """The session, if one is open and the daemon responds."""
        found = self._session
        return found if found is not None and found.responsive else None

    def wait(self, seconds: float) -> bool:
        """Wait for a session; return whether there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: self.session is not None, seconds)

    def drop(self, session: Session) -> None:
        """End a broken session, which frees its leases, and reconnect."""
        session.finish()

    def release_group(self, salt: bytes, group: str) -> int:
        """Remove the chunks that only one session of cache hints (``group``) has used.

        Returns their number. Blocks. Raises KVSidecarError.
        """
        session = self.session
        if session is None:
            raise Unavailable("the cache daemon is not attached; its chunks stay until it evicts them")
        request = pb.ReleaseGroupRequest(namespace=self.namespace, tenant_salt=salt, group=group)
        try:
            return int(session.stub.ReleaseGroup(request, timeout=_RELEASE_SECONDS).released)
        except grpc.RpcError as error:
            raise from_rpc(error) from error

    def close(self) -> None:
        self._stop.set()
        if (current := self._current) is not None:
            current.finish()
        self._thread.join(timeout=CONNECT_SECONDS + 1)

    def _run(self) -> None:
        backoff = _FIRST_BACKOFF
        while not self._stop.is_set():
            try:
                attached = self._attach_once()
            except _LACKING as error:
                attached = False
                self._log_once(f"no session with the cache daemon: {str(error) or 'no memory'}; serving without cache")
            backoff = _FIRST_BACKOFF if attached else min(_LAST_BACKOFF, backoff * 2)
            self._stop.wait(backoff)

    def _attach_once(self) -> bool:
        """Run one session from attach to end; return whether it became usable."""
        outgoing: _Outgoing = queue.SimpleQueue()
        hello = pb.Hello(
            protocol_version=SPOKEN.oldest,
            newest_protocol_version=SPOKEN.newest,
            client_name=self._name,
            descriptor=self.descriptor,
            namespace=self.namespace,
            engine=self._engine,
        )
        outgoing.put(pb.AttachRequest(hello=hello))
        try:
            opened = self._address.channel(_CHANNEL_OPTIONS)
        except ConfigurationError as error:  # a file may be replaced right now; the next attempt reads it again
            self._log_once(f"{error}; serving without cache")
            return False
        with opened as channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=CONNECT_SECONDS)
            except grpc.FutureTimeoutError:
                self._log_once(f"no cache daemon answers at {self._address.target}; serving without cache")
                return False
            session_channel = SessionChannel(channel)
            stub: Any = CacheServiceStub(cast(Any, session_channel))
            incoming = stub.Attach(iter(outgoing.get, None))
            watchdog = threading.Timer(CONNECT_SECONDS, incoming.cancel)
            session: Session | None = None
            held = False
            try:
                watchdog.start()
                welcome = next(incoming).welcome
                watchdog.cancel()
                session = Session(
                    welcome.epoch,
                    welcome.session_id,
                    stub,
                    welcome.heartbeat_interval_ms / 1000,
                    welcome.max_chunk_tokens,
                    welcome.verdict if welcome.HasField("verdict") else self.default_verdict,
                    remote=welcome.remote,
                    served_before=self.served_counts(),
                )
                self._current = session
                if not self._stop.is_set():
                    held = self._serve_session(session, welcome, session_channel, incoming, outgoing)
            except (grpc.RpcError, StopIteration, OSError, ValueError) as error:
                text = str(from_rpc(error)) if isinstance(error, grpc.RpcError) else str(error)
                self._log_once(f"the session with the cache daemon ended: {text}; serving without cache")
            finally:
                watchdog.cancel()
                self._session = self._current = None
                outgoing.put(None)
                incoming.cancel()
                if session is not None:
                    session.end()
            return held

    def _serve_session(
        self,
        session: Session,
        welcome: pb.Welcome,
        channel: SessionChannel,
        incoming: Iterator[pb.AttachResponse],
        outgoing: _Outgoing,
    ) -> bool:
        """Run a session until it ends, is dropped, or this connection is closed.

        Returns whether the session became usable. Heartbeats start before the arena is mapped, because mapping and
        registering a large arena may take longer than the daemon waits for a heartbeat.
        """
        acks = threading.Thread(target=self._read_acks, args=(session, incoming), name="kv-session-acks", daemon=True)
        acks.start()
        beats = threading.Thread(
            target=self._send_heartbeats, args=(session, outgoing), name="kv-session-heartbeats", daemon=True
        )
        beats.start()
        self._open_transport(session, welcome, channel)
        if not session.alive:
            return False
        with self._changed:
            self._session = session
            self._logged = ""
            self._changed.notify_all()
        how = f"arena of {format_size(welcome.arena.size_bytes)}" if welcome.memory_socket else "chunks are streamed"
        self._log.info(
            f"attached to the cache daemon at {self._address.target}, epoch {welcome.epoch:x}, {how}, "
            f"namespace {self.namespace.hex()[:12]}"
        )
        session.closed.wait()
        return True

    def _open_transport(self, session: Session, welcome: pb.Welcome, channel: SessionChannel) -> None:
        if self._maps and welcome.memory_socket:
            session.transport = SharedMemoryTransport(welcome, self._gpu, self._log_once)
        elif self._maps:
            session.transport = StreamTransport(welcome, session.stub, channel)
        if welcome.HasField("summary"):
            with contextlib.suppress(OSError):  # without the filter every prompt is looked up
                session.summary = BloomFilter(map_summary(welcome))

    def _read_acks(self, session: Session, incoming: Iterator[pb.AttachResponse]) -> None:
        try:
            for answer in incoming:
                session.record_ack(answer.heartbeat_ack)
        except grpc.RpcError as error:
            if not self._stop.is_set() and session.alive:
                self._log_once(f"the session with the cache daemon ended: {from_rpc(error)}; serving without cache")
        session.finish()

    def _send_heartbeats(self, session: Session, outgoing: _Outgoing) -> None:
        while session.wait_for_heartbeat():
            outgoing.put(pb.AttachRequest(heartbeat=session.next_heartbeat(self.served_counts())))

    def _log_once(self, text: str) -> None:
        """Log a state once, and not again at every attempt."""
        if text != self._logged:
            self._logged = text
            self._log.warning(text)
