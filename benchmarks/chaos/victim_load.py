"""Load by clients without a model, which store chunks and verify every byte that they read."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field

import grpc
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb

from benchmarks.node import Node
from benchmarks.peer import Peer, descriptor

CHUNK_TOKENS = 64
_PAUSE_SECONDS, _RETRY_SECONDS = 0.002, 0.02


def prompt(n: int) -> list[int]:
    """Return the ``n``-th prompt, of up to four chunks.

    The prompts of a dozen share their beginning. Some prompts extend others, so that longer chunks replace shorter
    ones.
    """
    rng = random.Random(n // 12)
    ids = [rng.randrange(1 << 20) for _ in range(4 * CHUNK_TOKENS)]
    return ids[: CHUNK_TOKENS * (1 + n % 4) - (17 if n % 3 else 0)] + ([n] if n % 5 else [])


@dataclass
class Downtime:
    """Intervals in which a fault stopped the daemon; requests that overlap an interval may fail."""

    times: list[tuple[float, float]] = field(default_factory=list)
    since: float | None = None

    def begin(self) -> None:
        self.since = time.monotonic()

    def end(self) -> None:
        assert self.since is not None
        self.times.append((self.since, time.monotonic() + 0.5))  # sessions notice the restart slightly later
        self.since = None

    def meets(self, began: float, ended: float) -> bool:
        return (self.since is not None and ended >= self.since) or any(
            began <= until and ended >= since for since, until in self.times
        )


class VictimLoad:
    """Several clients, one thread each. Counts wrong answers and unexpected failures."""

    def __init__(self, node: Node, peers: int, prompts: int, seed: int) -> None:
        self.node, self.prompts, self.down = node, prompts, Downtime()
        self.wrong = self.failed = self.reads = self.writes = 0
        self.reasons: list[str] = []
        self._idle, self._over = threading.Event(), threading.Event()
        self._busy = threading.Semaphore(0)
        self._waiting = 0
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(random.Random(seed + i),)) for i in range(peers)]
        for thread in self._threads:
            thread.start()

    def pause(self, seconds: float = 30.0) -> None:
        """Stop the load; return when every client is idle and has only its session."""
        self._idle.set()
        deadline = time.monotonic() + seconds
        while self._waiting < len(self._threads):
            if time.monotonic() > deadline:
                raise TimeoutError("the load did not come to rest")
            time.sleep(0.005)

    def go_on(self) -> None:
        self._idle.clear()

    def close(self) -> None:
        self._over.set()
        self._idle.clear()
        for thread in self._threads:
            thread.join()

    def _run(self, rng: random.Random) -> None:
        peer: Peer | None = None
        while not self._over.is_set():
            if self._idle.is_set():
                with self._lock:
                    self._waiting += 1
                while self._idle.is_set() and not self._over.is_set():
                    time.sleep(0.005)
                with self._lock:
                    self._waiting -= 1
            began = time.monotonic()
            try:
                peer = peer or Peer(self.node, timeout=10.0)
                self._work(peer, rng)
            except (grpc.RpcError, OSError, ValueError, StopIteration) as error:
                if not self.down.meets(began, time.monotonic()):
                    self.failed += 1
                    self.reasons.append(str(error)[:300])
                if peer is not None:
                    peer.close()
                    peer = None
                time.sleep(_RETRY_SECONDS)
        if peer is not None:
            peer.close()

    def _work(self, peer: Peer, rng: random.Random) -> None:
        ids = prompt(rng.randrange(self.prompts))
        if rng.random() < 0.5:
            self.writes += peer.try_put(ids, CHUNK_TOKENS)
        found = peer.match(ids)
        right = peer.is_right(ids, found)
        if rng.random() < 0.2:
            time.sleep(0.01)  # keep the lease for a while
            right = right and peer.is_right(ids, found)
        peer.release(found)
        self.reads += 1
        self.wrong += not right
        time.sleep(_PAUSE_SECONDS)


class DurableChunkWatcher:
    """Keeps the set of durable chunks up to date from the daemon's events."""

    def __init__(self, node: Node) -> None:
        self._channel = node.cache_channel()
        from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub

        stub = CacheServiceStub(self._channel)
        self._call = stub.Watch(pb.WatchRequest())
        next(self._call)
        self.durable: set[bytes] = set()
        token = b""
        while True:
            page = stub.List(pb.ListRequest(page_size=1000, page_token=token))
            self.durable |= {c.prefix_hash for c in page.chunks if c.durable}
            token = page.next_page_token
            if not token:
                break
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            for event in self._call:
                if event.type == pb.EVENT_TYPE_PERSISTED:
                    self.durable.add(event.chunk.prefix_hash)
                elif event.type in (pb.EVENT_TYPE_EVICTED, pb.EVENT_TYPE_DELETED, pb.EVENT_TYPE_UNPERSISTED):
                    self.durable.discard(event.chunk.prefix_hash)
        except grpc.RpcError:
            return  # the daemon is down; the events received so far count

    def close(self) -> set[bytes]:
        """Return the chunks that were durable when the stream ended."""
        self._thread.join(2.0)
        self._call.cancel()
        self._thread.join()
        self._channel.close()
        return self.durable


def paths(prompts: int, name: str = "m") -> dict[bytes, list[int]]:
    """Return, for the hash of every chunk that the load can store, the tokens up to the chunk's end."""
    root = keys.tenant_root(keys.namespace_id(descriptor(name)), b"")
    found = {}
    for n in range(prompts):
        ids, parent = prompt(n), root
        for at in range(0, len(ids), CHUNK_TOKENS):
            parent = keys.prefix_hash(parent, ids[at : at + CHUNK_TOKENS])
            found[parent] = ids[: at + CHUNK_TOKENS]
    return found
