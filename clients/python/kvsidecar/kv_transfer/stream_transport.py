"""Streaming transport for a daemon on another host.

Fetch reads leased chunks; Fill writes reserved chunks. Both directions have backpressure. gRPC's flow control bounds
the bytes that a peer may send. The reader receives the next payload while the caller uses the previous payload, and
buffers little more.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from kvkernels import Payload

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.cache.v1.cache_pb2_grpc import CacheServiceStub
from kvsidecar.kv_transfer.session_channel import SessionChannel
from kvsidecar.kv_transfer.transport import Fill
from kvsidecar.payload_wire import decode_message

_FETCH = f"/{pb.DESCRIPTOR.services_by_name['CacheService'].full_name}/Fetch"
_MESSAGE_BYTES = 1 << 20
_MAX_CHUNKS_PER_CALL = 1024
_MAX_SEND_BYTES = 64 << 20  # payloads stay in this process's memory until the daemon has them
_NUM_BUFFERS = 3  # one in use, one complete, one being received
_STALL_SECONDS = 3.0  # a connection without progress for this long counts as broken


class StreamTransport:
    """Streams the payloads of one session.

    The daemon keeps the chunks of a Fetch until the Fetch call ends, even if their lease ends before.
    """

    zero_copy = False

    def __init__(self, welcome: pb.Welcome, stub: CacheServiceStub, channel: SessionChannel) -> None:
        """Create the transport; ``channel`` is the stub's."""
        self._session_id, self._stub = welcome.session_id, stub
        self._fetch: Any = channel.unary_stream(
            _FETCH, request_serializer=pb.FetchRequest.SerializeToString, response_deserializer=decode_message
        )
        self.max_reserved_bytes = min(welcome.staging.size_bytes, _MAX_SEND_BYTES)

    def read(self, lease_id: bytes, matches: Sequence[pb.ChunkMatch], timeout: float) -> Generator[Payload, None, None]:
        ends = time.monotonic() + timeout
        for first in range(0, len(matches), _MAX_CHUNKS_PER_CALL):
            group = matches[first : first + _MAX_CHUNKS_PER_CALL]
            names = [match.prefix_hash for match in group]
            request = pb.FetchRequest(session_id=self._session_id, lease_id=lease_id, prefix_hashes=names)
            left = max(0.0, ends - time.monotonic())
            with _FetchStream(partial(self._fetch, request, timeout=left), group) as arriving:
                yield from arriving

    def write(self, granted: Sequence[tuple[int, pb.Reservation]], fill: Fill, timeout: float) -> list[pb.CommitItem]:
        items, payloads = [], []
        for i, reservation in granted:
            payload = np.empty(reservation.staging.size_bytes, np.uint8).data
            fill(i, payload)
            items.append(pb.CommitItem(reservation_id=reservation.reservation_id, checksum=keys.checksum(payload)))
            payloads.append((reservation.reservation_id, payload))
        sending = _FillStream(self._session_id, payloads)
        call = self._stub.Fill.future(iter(sending), timeout=timeout)
        try:
            sending.wait(call)
        finally:
            call.cancel()
        return items

    def close(self) -> None:
        pass


class _FillStream:
    """The requests of one Fill; gRPC's thread takes the next request when flow control allows."""

    def __init__(self, session_id: bytes, payloads: Sequence[tuple[bytes, memoryview]]) -> None:
        self._session_id, self._payloads = session_id, payloads
        self._taken = time.monotonic()

    def __iter__(self) -> Iterator[pb.FillRequest]:
        yield pb.FillRequest(session_id=self._session_id)
        for reservation_id, payload in self._payloads:
            yield pb.FillRequest(reservation_id=reservation_id)
            for at in range(0, len(payload), _MESSAGE_BYTES):
                self._taken = time.monotonic()
                yield pb.FillRequest(data=bytes(payload[at : at + _MESSAGE_BYTES]))
        self._taken = time.monotonic()

    def wait(self, call: Any) -> None:
        """Wait for the answer. Raises grpc.RpcError, and ConnectionError when the transfer stalls."""
        while (left := self._taken + _STALL_SECONDS - time.monotonic()) > 0:
            try:
                call.result(timeout=left)
                return
            except grpc.FutureTimeoutError:  # check again: gRPC may have taken a message meanwhile
                continue
        raise ConnectionError(f"the cache daemon took nothing for {_STALL_SECONDS:g} s")


class _FetchStream:
    """The payloads of one Fetch.

    A thread receives payloads and verifies their checksums while the caller uses earlier payloads.
    """

    def __init__(self, fetch: Callable[[], Any], matches: Sequence[pb.ChunkMatch]) -> None:
        """Allocate buffers, then call ``fetch``, which makes the daemon keep all chunks.

        Raises the exceptions of allocation or starting a thread, and leaves nothing open.
        """
        self._matches = matches
        size = max(match.payload_bytes for match in matches)
        self._free: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[tuple[memoryview, int] | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._receive, name="kv-fetch", daemon=True)
        with ExitStack() as held:
            for _ in matches[:_NUM_BUFFERS]:
                self._free.put(np.empty(size, np.uint8).data)
            self._call = fetch()
            held.callback(self._end)
            self._heard = time.monotonic()
            self._thread.start()
            self._held = held.pop_all()

    def __enter__(self) -> _FetchStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._held.close()

    def _end(self) -> None:
        self._call.cancel()
        self._free.put(None)
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def __iter__(self) -> Iterator[memoryview]:
        for _ in self._matches:
            buffer, size = self._next()
            yield buffer[:size].toreadonly()
            self._free.put(buffer)

    def _next(self) -> tuple[memoryview, int]:
        """Return the next payload's buffer and size.

        Raises ConnectionError on a stall, and the exceptions of receiving.
        """
        asked = time.monotonic()
        while True:
            left = max(self._heard, asked) + _STALL_SECONDS - time.monotonic()
            if left <= 0:
                raise ConnectionError(f"the cache daemon sent nothing for {_STALL_SECONDS:g} s")
            try:
                found = self._ready.get(timeout=left)
            except queue.Empty:  # check again: a message may have arrived meanwhile
                continue
            if isinstance(found, Exception):
                raise found
            return found

    def _receive(self) -> None:
        try:
            for match in self._matches:
                buffer = self._free.get()
                if buffer is None:
                    return
                self._receive_one(match, buffer)
                self._ready.put((buffer, match.payload_bytes))
        except Exception as error:
            self._ready.put(error)

    def _receive_one(self, match: pb.ChunkMatch, buffer: memoryview) -> None:
        """Receive one chunk. Raises grpc.RpcError, and ValueError if the stream contains another chunk."""
        first, at = self._message(), 0
        header = pb.FetchResponse().header if isinstance(first, memoryview) else first.header
        if header.prefix_hash != match.prefix_hash or header.payload_bytes != match.payload_bytes:
            raise ValueError("the daemon sent another chunk than was asked for")
        while at < match.payload_bytes:
            message = self._message()
            data = message if isinstance(message, memoryview) else message.data
            if not data or at + len(data) > match.payload_bytes:
                raise ValueError(f"{at + len(data)} bytes of a chunk came, it has {match.payload_bytes}")
            buffer[at : at + len(data)] = data
            at += len(data)
        if keys.checksum(buffer[:at]) != header.checksum:
            raise ValueError("the bytes of a chunk that came do not have its checksum")

    def _message(self) -> pb.FetchResponse | memoryview:
        found: pb.FetchResponse | memoryview | None = next(self._call, None)
        if found is None:
            raise ValueError("the daemon's stream ended within a chunk")
        self._heard = time.monotonic()
        return found
