"""Hostile guest at a daemon's shared socket: all kinds of attacks at once, without a pause.

``python -m benchmarks.chaos.hostile_guest SOCKET`` prints a line when it begins, runs until its standard input ends,
then prints the number of attempts and of answers of each kind as JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.chunk_layout import new_header
from kvsidecar.process.runtime_dir import socket_target

from benchmarks.peer import GEOMETRY, descriptor, payload_of

_MESSAGE_BYTES = (6 << 20) - 64
_IDLE_STREAMS = 60
_SALT = b"guest"
_PAUSE_SECONDS = 0.001
_FIRST_STEP_SECONDS, _END_SECONDS = 60.0, 40.0


class Guest:
    """One connection of the attacker."""

    def __init__(self, socket: Path) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", 64 << 20)]
        self.channel = grpc.insecure_channel(socket_target(socket), options=options)
        self.stub: Any = CacheServiceStub(self.channel)
        self.descriptor = descriptor("guest")
        self.namespace = keys.namespace_id(self.descriptor)
        self.root = keys.tenant_root(self.namespace, _SALT)

    def attach(self, said: queue.SimpleQueue[Any]) -> tuple[Any, bytes]:
        hello = pb.Hello(protocol_version=2, client_name="g", descriptor=self.descriptor, namespace=self.namespace)
        said.put(pb.AttachRequest(hello=hello))
        call = self.stub.Attach(iter(said.get, None))
        return call, next(call).welcome.session_id

    def store(self, ids: list[int], start: int = 0, parent: bytes = b"", prefill_seconds: float = 0.0) -> bytes:
        header = new_header(GEOMETRY, ids, start)
        header.parent_prefix_hash, header.prefill_seconds = parent, prefill_seconds
        payload = payload_of(ids, header.payload_bytes)
        header.checksum = keys.checksum(payload)
        begun = pb.StoreStart(descriptor=self.descriptor, tenant_salt=_SALT, header=header)
        messages = [pb.StoreRequest(start=begun), pb.StoreRequest(data=payload)]
        return bytes(self.stub.Store(iter(messages), timeout=30).prefix_hash)

    def raw(self, method: str, body: bytes) -> None:
        path = f"/kvsidecar.cache.v1.CacheService/{method}"
        self.channel.unary_unary(path, None, None)(body, timeout=30)


def heartbeats(guest: Guest) -> Iterator[None]:
    """Send heartbeats whose totals rise to the maximum and fall again."""
    for most in itertools.cycle((1 << 48, 0)):
        said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        call, _ = guest.attach(said)
        for value in (most, (1 << 48) - most, most):
            said.put(pb.AttachRequest(heartbeat=pb.Heartbeat(skipped_tokens=value, prompts=value)))
            yield
            next(call)


def amplifying(guest: Guest) -> Iterator[None]:
    """Send messages of the maximum size, and messages that are small on the wire but large in memory."""
    header = b"\x28\x00" * 2900
    nested = (b"\x1a\xa8\x2d" + header) * 1000
    prompt = pb.MatchRequest(namespace=guest.namespace, token_ids=[1 << 20] * (1 << 20)).SerializeToString()
    members = {"Match": b"\x2a\x00", "Reserve": b"\x1a\x00", "Commit": b"\x1a\x00", "Release": b"\x12\x00"}
    bodies = [(method, member * (_MESSAGE_BYTES // 2)) for method, member in members.items()]
    for method, body in itertools.cycle([*bodies, ("Reserve", nested), ("Match", prompt)]):
        yield
        guest.raw(method, body)


def pins(guest: Guest) -> Iterator[None]:
    """Pin chunks without end, although the daemon refuses pins beyond a limit."""
    for number in itertools.count():
        yield
        key = guest.store([number, 1, *range(200)])
        prefix = pb.PrefixRef(namespace=guest.namespace, tenant_salt=_SALT, prefix_hash=key)
        guest.stub.Pin(pb.PinRequest(prefix=prefix), timeout=30)


def worth(guest: Guest) -> Iterator[None]:
    """Store chunks with absurdly high prefill times, which would make eviction spare them."""
    for number in itertools.count():
        yield
        guest.store([number, 2, *range(200)], prefill_seconds=3e38)


def idle_streams(guest: Guest) -> Iterator[None]:
    """Open Store calls, and send nothing after the first message."""
    for number in itertools.count():
        held = []
        for n in range(_IDLE_STREAMS):
            said: queue.SimpleQueue[Any] = queue.SimpleQueue()
            begun = pb.StoreStart(
                descriptor=guest.descriptor, tenant_salt=_SALT, header=new_header(GEOMETRY, [number, n, 3], 0)
            )
            said.put(pb.StoreRequest(start=begun))
            held.append((guest.stub.Store.future(iter(said.get, None), timeout=5), said))
        yield
        for call, said in held:
            with contextlib.suppress(grpc.FutureTimeoutError):
                call.exception(timeout=10)
            said.put(None)


def siblings(guest: Guest) -> Iterator[None]:
    """Store one prompt as chunks of many different lengths, so that a Match must search many combinations."""
    ends: list[tuple[int, bytes]] = [(0, b"")]
    for at, parent in ends:
        for length in (1, 2, 3):
            yield
            if at + length <= 17:
                ends.append((at + length, guest.store([7] * length, at, parent)))
            guest.raw("Match", pb.MatchRequest(namespace=guest.namespace, tenant_salt=_SALT, token_ids=[7] * 17)
                      .SerializeToString())  # fmt: skip


def leases(guest: Guest) -> Iterator[None]:
    """Open sessions, and take as many leases and reservations as possible."""
    while True:
        said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        _call, session = guest.attach(said)
        for number in range(1000):
            yield
            headers = [new_header(GEOMETRY, [number, n, 4], 0) for n in range(64)]
            guest.stub.Reserve(pb.ReserveRequest(session_id=session, headers=headers, tenant_salt=_SALT), timeout=30)
            guest.stub.Match(pb.MatchRequest(session_id=session, tenant_salt=_SALT, token_ids=[7] * 17), timeout=30)


ATTACKS: dict[str, Callable[[Guest], Iterator[None]]] = {
    attack.__name__: attack for attack in (heartbeats, amplifying, pins, worth, idle_streams, siblings, leases)
}


def run(socket: Path, over: threading.Event) -> dict[str, Any]:
    """Run all attacks concurrently until stopped, each on its own connection; return counts by attack and answer.

    On a slow machine, an attack goes on until its first step, but at most ``_FIRST_STEP_SECONDS``.
    """
    counts: dict[str, Counter[str]] = {name: Counter() for name in ATTACKS}
    deadline = time.monotonic() + _FIRST_STEP_SECONDS

    def one(name: str) -> None:
        guest, steps = Guest(socket), None
        while not over.is_set() or (not counts[name]["steps"] and time.monotonic() < deadline):
            try:
                steps = steps or ATTACKS[name](guest)
                next(steps)
                counts[name]["steps"] += 1
            except grpc.RpcError as error:
                known: Any = error
                counts[name][known.code().name] += 1
                steps = None
            except StopIteration:
                steps = None
            time.sleep(_PAUSE_SECONDS)
        guest.channel.close()

    threads = [threading.Thread(target=one, args=(name,), daemon=True) for name in ATTACKS]
    for thread in threads:
        thread.start()
    over.wait()
    for thread in threads:
        thread.join(_END_SECONDS)
    return {name: dict(found) for name, found in counts.items()}


def main() -> None:
    over = threading.Event()
    print("attacking", flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    print(json.dumps(run(Path(sys.argv[1]), over)), flush=True)


if __name__ == "__main__":
    main()
