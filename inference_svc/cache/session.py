"""The session with the daemon: attached while it can be, tried again when it cannot."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog
from kvkernels import DeviceBytes, Payload
from kvkernels.native import visible
from kvsidecar import keys
from kvsidecar.arenas import map_arena
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.cache.v1.chunk_pb2 import NamespaceDescriptor
from kvsidecar.errors import from_rpc
from kvsidecar.summary import Summary

from inference_svc.cache.device_arena import CudaArena

PROTOCOL_VERSION = 1
CONNECT_SECONDS = 2.0
_FIRST_BACKOFF, _LAST_BACKOFF = 0.05, 2.0
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
]

log = structlog.get_logger("cache")


@dataclass(eq=False)
class Session:
    """One attachment to one start of the daemon. ``arena`` is its memory, mapped or imported."""

    epoch: int
    id: bytes
    arena: memoryview | CudaArena
    stub: CacheServiceStub
    heartbeat_seconds: float
    verdict: pb.ReuseVerdict | None = None
    last_ack: float = field(default_factory=time.monotonic)
    alive: bool = True
    summary: Summary | None = None  # of what the daemon's index might hold
    skipped_matches: int = 0
    skipped_tokens: int = 0
    pinned_at: int | None = None  # the address of host memory that a CUDA device reads and writes directly

    @property
    def trusted(self) -> bool:
        """Leases taken a moment ago are still held: the daemon cannot have ended the session yet."""
        return self.alive and time.monotonic() - self.last_ack < 2 * self.heartbeat_seconds

    def end(self) -> None:
        """Marks the session as over and lets go of the arena; views in use keep it mapped until they are done.

        Explicitly: a failed call refers to its own traceback, and through it to this object, until a garbage
        collection that may be hours away. A dead daemon's arena would stay in memory all that time.
        """
        self.alive = False
        if self.pinned_at is not None:
            visible.unpin(self.pinned_at)
        if isinstance(self.arena, CudaArena):
            self.arena.close()
        self.arena = memoryview(b"")
        self.summary = None

    def may_hold(self, root: bytes, tokens: Sequence[int]) -> bool:
        """Whether a prompt might begin with something stored."""
        summary = self.summary
        return summary is None or summary.may_hold_prefix(root, tokens)

    def may_hold_content(self, root: bytes, tokens: Sequence[int]) -> bool:
        """Whether these tokens might be stored as a chunk, in whatever context."""
        summary = self.summary
        return summary is None or summary.may_hold_content(root, tokens)

    def skipped(self, tokens: int) -> None:
        """Counts a prompt that was not looked up because nothing of it is stored."""
        self.skipped_matches += 1
        self.skipped_tokens += tokens

    def payload(self, slot: pb.SlotRef) -> Payload:
        """The slot's bytes. Raises ValueError for a reference that cannot be this session's."""
        if slot.epoch != self.epoch:
            raise ValueError(f"slot of epoch {slot.epoch:x} in a session of epoch {self.epoch:x}")
        end = slot.offset + slot.size_bytes
        if slot.arena_id != 0 or end > len(self.arena):
            raise ValueError(f"slot {slot.arena_id}:{slot.offset}+{slot.size_bytes} is outside the arena")
        if isinstance(self.arena, CudaArena):
            return self.arena.part(slot.offset, slot.size_bytes)
        return self.arena[slot.offset : end]

    def checksum(self, payload: Payload) -> int:
        """Of a payload of this session's."""
        if isinstance(payload, DeviceBytes):
            assert isinstance(self.arena, CudaArena)
            payload = self.arena.copy(payload)
        return keys.checksum(payload)


class DaemonLink:
    """Keeps a session open on a thread of its own. ``session`` is None while there is none."""

    def __init__(self, target: str, name: str, descriptor: NamespaceDescriptor, gpu: int | None = None) -> None:
        """``gpu`` is the CUDA device that reads and writes the daemon's memory directly, if one does."""
        self._target, self._name, self.descriptor, self._gpu = target, name, descriptor, gpu
        self.namespace = keys.namespace_id(descriptor)
        self._session: Session | None = None
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._logged = ""
        self._thread = threading.Thread(target=self._run, name="kv-link", daemon=True)
        self._thread.start()

    @property
    def session(self) -> Session | None:
        found = self._session
        return found if found is not None and found.alive else None

    def wait(self, seconds: float) -> bool:
        """Waits for a session; True when there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: self.session is not None, seconds)

    def drop(self, session: Session) -> None:
        """Ends a session whose daemon did not answer; a new one is tried. All its leases are freed."""
        session.alive = False
        self._ended.set()

    def close(self) -> None:
        self._stop.set()
        self._ended.set()
        self._thread.join(timeout=CONNECT_SECONDS + 1)

    def _run(self) -> None:
        backoff = _FIRST_BACKOFF
        while not self._stop.is_set():
            attached = self._attach_once()
            backoff = _FIRST_BACKOFF if attached else min(_LAST_BACKOFF, backoff * 2)
            self._stop.wait(backoff)

    def _attach_once(self) -> bool:
        """One session from beginning to end. True when it came about."""
        self._ended.clear()
        outgoing: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            client_name=self._name,
            descriptor=self.descriptor,
            namespace=self.namespace,
        )
        outgoing.put(pb.AttachRequest(hello=hello))
        with grpc.insecure_channel(self._target, options=_CHANNEL_OPTIONS) as channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=CONNECT_SECONDS)
            except grpc.FutureTimeoutError:
                self._note("the cache daemon does not answer; serving without cache")
                return False
            stub: Any = CacheServiceStub(channel)
            incoming = stub.Attach(iter(outgoing.get, None))
            watchdog = threading.Timer(CONNECT_SECONDS, incoming.cancel)
            watchdog.start()
            session: Session | None = None
            try:
                welcome = next(incoming).welcome
                watchdog.cancel()
                session = self._begin(welcome, stub)
                self._hold(session, incoming, outgoing)
            except (grpc.RpcError, StopIteration, OSError, ValueError) as error:
                text = str(from_rpc(error)) if isinstance(error, grpc.RpcError) else str(error)
                self._note(f"the session with the cache daemon ended: {text}; serving without cache")
            finally:
                watchdog.cancel()
                if session is not None:
                    session.end()
                self._session = None
                outgoing.put(None)
                incoming.cancel()
            return session is not None

    def _begin(self, welcome: pb.Welcome, stub: CacheServiceStub) -> Session:
        if not welcome.arenas:
            raise ValueError("the daemon offers no memory")
        described = welcome.arenas[0]
        arena: memoryview | CudaArena
        if described.kind in (pb.ARENA_KIND_CUDA, pb.ARENA_KIND_CUDA_IPC) and self._gpu is not None:
            arena = CudaArena(described, welcome.session_id, self._gpu)
        else:
            arena = map_arena(described, welcome.session_id)
        session = Session(
            welcome.epoch,
            welcome.session_id,
            arena,
            stub,
            welcome.heartbeat_interval_ms / 1000,
            welcome.verdict if welcome.HasField("verdict") else None,
        )
        if welcome.HasField("summary"):
            # A daemon in another container may share its arena by descriptor only; then every prompt is looked up.
            with contextlib.suppress(OSError, ValueError):
                session.summary = Summary.map(welcome.summary)
        if self._gpu is not None and isinstance(arena, memoryview) and visible.pin(arena):
            session.pinned_at = visible.address_of(arena)
        with self._changed:
            self._session = session
            self._logged = ""
            self._changed.notify_all()
        log.info("attached to the cache daemon", epoch=f"{welcome.epoch:x}", arena_bytes=described.size_bytes)
        return session

    def _hold(self, session: Session, incoming: Iterator[pb.AttachResponse], outgoing: queue.SimpleQueue[Any]) -> None:
        """Sends heartbeats until the stream ends, the session is dropped or the link is closed."""

        def read() -> None:
            try:
                for answer in incoming:
                    session.last_ack = time.monotonic()
                    if answer.heartbeat_ack.HasField("verdict"):
                        session.verdict = answer.heartbeat_ack.verdict
            except grpc.RpcError as error:
                if not self._stop.is_set():
                    self._note(f"the session with the cache daemon ended: {from_rpc(error)}; serving without cache")
            session.alive = False
            self._ended.set()

        reader = threading.Thread(target=read, name="kv-link-read", daemon=True)
        reader.start()
        while not self._ended.wait(session.heartbeat_seconds):
            beat = pb.Heartbeat(skipped_matches=session.skipped_matches, skipped_tokens=session.skipped_tokens)
            outgoing.put(pb.AttachRequest(heartbeat=beat))

    def _note(self, text: str) -> None:
        """Logs a state once, not at every attempt."""
        if text != self._logged:
            self._logged = text
            log.warning(text)
