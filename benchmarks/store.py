"""Throughput of the store's paths against memory, disk and Redis on the same machine.

arena         a Match, and a copy of every chunk out of the arena; the lease is released asynchronously, as workers do
arena_single  the same for a prompt of one chunk
arena_write   Reserve, a copy into staging with its checksum, and Commit
lmdb_cold     reads of the durable tier, after the page cache was dropped
pread_cold    plain reads of the same file, after the page cache was dropped
redis         one MGET of all chunks over a Unix socket, received into a buffer of one chunk
redis_write   one SET per chunk, pipelined
rpc           an empty call, which shows how much of a Match is gRPC's time

Every repetition measures all arms of a size in turn. Times are per chunk.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.chunk_pb2 import DATA_TYPE_FLOAT32
from kvsidecar.chunk_layout import Geometry

from benchmarks import page_cache, report
from benchmarks.node import Node
from benchmarks.peer import GEOMETRY, Peer
from benchmarks.remote_servers import RedisServer
from cache_daemon.durable.durable_tier import ReadJob, ReadResult
from cache_daemon.durable.lmdb_tier import LmdbTier

_TOKENS, _HEADS, _DIM = 64, 2, 64
_LAYER_BYTES = 2 * _TOKENS * _HEADS * _DIM * 4
_CHUNK_TOKENS = 16
_PATHS = (
    "memcpy",
    "arena",
    "arena_single",
    "arena_write",
    "grpc_stream",
    "redis",
    "redis_write",
    "lmdb_cold",
    "pread_cold",
)


class ArmTimes:
    """Times of one arm at one size, in seconds per chunk."""

    def __init__(self, path: str, size_bytes: int) -> None:
        self.path, self.size_bytes = path, size_bytes
        self.seconds: list[float] = []

    def measure(self, work: Callable[[], None], chunks: int) -> None:
        began = time.perf_counter()
        work()
        self.seconds.append((time.perf_counter() - began) / chunks)

    def row(self) -> dict[str, Any]:
        ordered = sorted(self.seconds)
        figure = report.figure([s * 1e6 for s in ordered], "p50_us")
        return {
            "path": self.path,
            "size_bytes": self.size_bytes,
            "gb_per_s": round(self.size_bytes / figure["p50_us"] / 1e3, 3),
            **figure,
            "p99_us": round(report.p99(ordered) * 1e6, 1),
        }


class Redis:
    """Redis server on a Unix socket without persistence, and one client that pipelines commands."""

    def __init__(self, folder: Path) -> None:
        path = str(folder / "redis.sock")
        self._server = RedisServer(folder, ("--unixsocket", path))
        self._server.start()
        assert self._server.command("PING") == "PONG"  # it listens on the Unix socket now, too
        self._client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._client.connect(path)

    def set(self, names: list[bytes], value: memoryview) -> None:
        """Write the same value under all names, then wait for all replies."""
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n"
        for name in names:
            self._client.sendmsg([head % (len(name), name, len(value))], (), socket.MSG_MORE)
            self._client.sendall(value, socket.MSG_MORE)
            self._client.sendall(b"\r\n")
        replies = b"+OK\r\n" * len(names)
        assert self._client.recv(len(replies), socket.MSG_WAITALL) == replies

    def get(self, names: list[bytes], into: memoryview) -> None:
        """Read all values, one after another, into the same buffer of one value's size."""
        asked = b"".join(b"$%d\r\n%s\r\n" % (len(n), n) for n in names)
        self._client.sendall(b"*%d\r\n$4\r\nMGET\r\n" % (len(names) + 1) + asked)
        # The client knows the sizes of values and frames, so it need not parse the protocol.
        frame = memoryview(bytearray(b"*%d\r\n" % len(names)))
        self._client.recv_into(frame, 0, socket.MSG_WAITALL)
        head, end = memoryview(bytearray(b"$%d\r\n" % len(into))), memoryview(bytearray(2))
        for _ in names:
            self._client.recvmsg_into([head, into, end], 0, socket.MSG_WAITALL)
        assert (bytes(head), bytes(end)) == (b"$%d\r\n" % len(into), b"\r\n")

    def close(self) -> None:
        self._client.close()
        self._server.stop()


def prompt(base: int, chunks: int) -> list[int]:
    return [(base + n) & 0xFFFFFFFF for n in range(chunks * _TOKENS)]


def store_prompt(peer: Peer, ids: list[int], source: memoryview) -> None:
    """Reserve, write and commit all chunks of a prompt."""
    parent = b""
    headers = []
    for at in range(0, len(ids), _TOKENS):
        cut = ids[at : at + _TOKENS]
        headers.append(peer.header(cut, at, parent))
        parent = keys.prefix_hash(parent or keys.tenant_root(peer.namespace, b""), cut)
    items = []
    for reserved in peer.reserve(*headers):
        view = peer.staged(reserved.staging)
        np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(source[: len(view)], np.uint8))
        items.append(pb.CommitItem(reservation_id=reserved.reservation_id, checksum=keys.checksum(view)))
    request = pb.CommitRequest(session_id=peer.session, epoch=peer.welcome.epoch, items=items)
    assert peer.stub.Commit(request).committed == len(items)


def measure(layers: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all arms of one size."""
    size = layers * _LAYER_BYTES
    chunks = max(1, options.total_mb * (1 << 20) // size)
    source = memoryview(np.random.default_rng(1).integers(0, 256, size, np.uint8)).cast("B")
    target = np.zeros(size, np.uint8)
    arms = {name: ArmTimes(name, size) for name in _PATHS}
    geometry = Geometry(layers, _HEADS, _DIM, DATA_TYPE_FLOAT32, 16)
    arena, budget = f"{4 * options.total_mb}MiB", f"{8 * options.total_mb}MiB"
    flags = {"staging_bytes": f"{2 * options.total_mb}MiB", "compression": "none"}
    with Node(workers=0, arena_bytes=arena, store_bytes=budget, daemon_flags=flags) as node:
        peer = Peer(node, geometry=geometry)
        kept, plain = (
            prompt(0, chunks),
            np.tile(np.frombuffer(source, np.uint8), chunks),
        )  # private pages, not the zero page
        store_prompt(peer, kept, source)
        node.settle()
        redis = Redis(node.folder) if shutil.which("redis-server") else None
        names = [b"chunk-%d" % n for n in range(chunks)]
        if redis is not None:
            redis.set(names, source)

        def copy_plain() -> None:
            for at in range(0, len(plain), size):
                np.copyto(target, plain[at : at + size])

        releases: list[Any] = []

        def read(ids: list[int]) -> None:
            found = peer.match(ids)
            for match in found.matches:
                np.copyto(target, np.frombuffer(peer.view(match), np.uint8))
            assert found.matched_tokens == len(ids)
            releases.append(peer.release_later(found))

        def stream() -> None:
            for match in hashes:
                request = pb.FetchRequest(namespace=peer.namespace, prefix_hash=match.prefix_hash)
                at = 0
                for piece in peer.stub.Fetch(request):
                    target[at : at + len(piece.data)] = np.frombuffer(piece.data, np.uint8)
                    at += len(piece.data)
                assert at == size

        hashes = peer.stub.Match(pb.MatchRequest(namespace=peer.namespace, token_ids=kept)).matches[:4]
        for n in range(options.repeats + 1):
            if n == 1:  # the first repetition only maps pages
                for arm in arms.values():
                    arm.seconds.clear()
            arms["memcpy"].measure(copy_plain, chunks)
            for name, ids in (("arena", kept), ("arena_single", kept[:_TOKENS])):
                arms[name].measure(lambda ids=ids: read(ids), len(ids) // _TOKENS)
                assert releases.pop().result().released == 1
            fresh = prompt((n + 1) << 20, chunks)
            arms["arena_write"].measure(lambda fresh=fresh: store_prompt(peer, fresh, source), chunks)
            arms["grpc_stream"].measure(stream, len(hashes))
            if redis is not None:
                arms["redis"].measure(lambda: redis.get(names, memoryview(target)), chunks)
                arms["redis_write"].measure(lambda: redis.set(names, source), chunks)
            node.settle()
            root = keys.tenant_root(peer.namespace, b"")
            first = keys.prefix_hash(root, fresh[:_TOKENS])
            peer.stub.Delete(pb.DeleteRequest(prefix=pb.PrefixRef(root=root, prefix_hash=first)))
        node.settle()
        peer.close()
        if redis is not None:
            redis.close()
        node.kill("daemon")
        if page_cache.can_drop():
            for _ in range(options.cold_repeats):
                cold(node.folder / "store", 8 * options.total_mb << 20, arms, chunks)
    return [arm.row() for arm in arms.values() if arm.seconds]


def cold(folder: Path, budget: int, arms: dict[str, ArmTimes], chunks: int) -> None:
    """Measure cold reads of the durable tier, and plain reads of the same number of bytes from its file."""
    tier = LmdbTier(folder, budget, False, "none", None)
    try:
        headers = [found.header for found in tier.load()][:chunks]
        buffers = [memoryview(bytearray(h.payload_bytes)) for h in headers]
        jobs = [ReadJob(h.prefix_hash, b, h.checksum) for h, b in zip(headers, buffers, strict=True)]
        page_cache.drop()

        def read() -> None:
            assert set(tier.read(jobs)) == {ReadResult.OK}

        arms["lmdb_cold"].measure(read, len(jobs))
    finally:
        tier.close()
    wanted = sum(map(len, buffers))
    handle = os.open(folder / "data.mdb", os.O_RDONLY)
    try:
        page_cache.drop()

        def plain() -> None:
            piece = memoryview(buffers[0])[: 1 << 20]
            for at in range(0, wanted, len(piece)):
                os.preadv(handle, [piece[: wanted - at]], at)

        arms["pread_cold"].measure(plain, len(jobs))
    finally:
        os.close(handle)


def matches(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Measure Match for 1 and 256 matched chunks, and how long a Match of 2^20 tokens stalls the event loop."""
    rows, summary = [], {}
    with Node(workers=0, arena_bytes="64MiB", daemon_flags={"staging_bytes": "16MiB"}) as node:
        peer = Peer(node, geometry=GEOMETRY)
        ids = list(range(256 * _CHUNK_TOKENS))
        peer.try_put(ids, _CHUNK_TOKENS)
        for chunks in (1, 256):
            arm, asked = ArmTimes(f"match_{chunks}", 0), ids[: chunks * _CHUNK_TOKENS]
            for n in range(options.matches + 20):
                began = time.perf_counter()
                found = peer.match(asked)
                if n >= 20:
                    arm.seconds.append(time.perf_counter() - began)
                assert len(found.matches) == chunks
                peer.release(found)
            rows.append(arm.row())
            summary[f"match_{chunks}_p50_ms"] = round(rows[-1]["p50_us"] / 1e3, 3)
        nothing, arm = pb.AbortRequest(session_id=peer.session), ArmTimes("rpc", 0)
        for _ in range(options.matches):
            arm.measure(lambda: peer.stub.Abort(nothing), 1)
        rows.append(arm.row())
        summary["rpc_p50_ms"] = round(rows[-1]["p50_us"] / 1e3, 3)
    with Node(workers=0, arena_bytes="64MiB", daemon_flags={"staging_bytes": "16MiB"}) as node:
        peer = Peer(node, geometry=GEOMETRY)
        peer.try_put(ids, _CHUNK_TOKENS)
        million = [*ids, *range(1 << 20)][: 1 << 20]
        time.sleep(1.0)
        idle = peer.stats().loop_stall_ms
        began = time.perf_counter()
        peer.release(peer.match(million))
        summary["match_1m_tokens_ms"] = round((time.perf_counter() - began) * 1e3, 1)
        time.sleep(0.1)
        summary["match_1m_tokens_loop_ms"] = round(peer.stats().loop_stall_ms, 1)
        summary["idle_loop_ms"] = round(idle, 1)
        peer.close()
    return rows, summary


def run(options: argparse.Namespace) -> dict[str, Any]:
    if not shutil.which("redis-server"):
        report.console.print("redis is left out: no redis-server is installed (Debian: apt-get install redis-server)")
    if not page_cache.can_drop():
        report.console.print("lmdb_cold and pread_cold are left out: dropping the page cache needs root")
    rows: list[dict[str, Any]] = []
    with report.progress() as progress:
        task = progress.add_task("measuring", total=len(options.layers) + 1)
        for layers in options.layers:
            rows += measure(layers, options)
            progress.advance(task)
        of_matches, summary = matches(options)
        progress.advance(task)
    rate = {(r["path"], r["size_bytes"]): r["gb_per_s"] for r in rows}
    sizes = [layers * _LAYER_BYTES for layers in options.layers]

    def worst(one: str, other: str, least: int = 0) -> float | None:
        ratios = [rate[one, s] / rate[other, s] for s in sizes if s >= least and (other, s) in rate]
        return round(min(ratios), 3) if ratios else None

    ratios = {
        "arena_of_memcpy_from_1mb": worst("arena", "memcpy", 1 << 20),
        "arena_write_of_memcpy_from_1mb": worst("arena_write", "memcpy", 1 << 20),
        "arena_over_redis": worst("arena", "redis"),
        "arena_write_over_redis": worst("arena_write", "redis_write"),
        "lmdb_cold_of_pread": worst("lmdb_cold", "pread_cold"),
    }
    return report.write(options, "store", [*rows, *of_matches], {**ratios, **summary})


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = report.parser("store", __doc__ or "")
    parser.add_argument(
        "--layers", type=int, nargs="*", default=[5, 16, 64, 256], help="chunk sizes in units of 64 KiB"
    )
    parser.add_argument("--total-mb", type=int, default=64, help="payload size of a prompt")
    parser.add_argument("--repeats", type=report.at_least(1), default=30)
    parser.add_argument("--cold-repeats", type=report.at_least(1), default=5)
    parser.add_argument("--matches", type=report.at_least(1), default=1000)
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers, options.repeats, options.cold_repeats, options.matches = [5, 64], 5, 2, 200
    return run(options)


if __name__ == "__main__":
    report.exit_on_sigterm()
    main()
