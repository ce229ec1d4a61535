"""Publishes events over vLLM's ZeroMQ sockets: numbered batches, and replays on request.

A batch is three frames, ``[topic, number, msgpack]``; the number has 8 bytes, big-endian, and counts batches from 0. A
subscriber that missed batches sends the number of the first missing one to the replay socket, after an empty frame. The
subscriber gets ``["", topic, number, msgpack]`` for each kept batch from that number on, and finally the number -1
without a payload.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvsidecar.errors import ConfigurationError
from kvsidecar.events.vllm_events import Event, EventBatch, encode

END = (-1).to_bytes(8, "big", signed=True)
KEPT = 10_000
_HIGH_WATER = 100_000
_STOP = b"stop"


@dataclass(frozen=True)
class PublisherEndpoints:
    """ZeroMQ endpoints; an empty ``replay`` means no replay socket.

    With ``connects``, this process connects to the subscriber, which listens.
    """

    events: str
    replay: str = ""
    topic: str = ""
    connects: bool = False


class EventPublisher:
    """Publishes batches, and answers replays on its own thread.

    ``publish`` is for one thread. Calls ``on_gap`` on the replay thread when a subscriber requests batches that are no
    longer kept. Raises ConfigurationError for unusable endpoints.
    """

    def __init__(self, endpoints: PublisherEndpoints, on_gap: Callable[[], None], kept: int = KEPT) -> None:
        self._topic, self._on_gap, self._kept = endpoints.topic.encode(), on_gap, kept
        self._past: deque[tuple[bytes, bytes]] = deque()  # numbers and payloads
        self._next, self._lock = 0, threading.Lock()
        self._context = zmq.Context()
        self._context.linger = 0
        try:
            self._events = self._socket(zmq.PUB, endpoints.events, endpoints.connects)
            self._replay = self._socket(zmq.ROUTER, endpoints.replay) if endpoints.replay else None
        except ConfigurationError:
            self._context.destroy()
            raise
        stop = f"inproc://{id(self)}"
        self._stop, self._stopped = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._stopped.bind(stop)
        self._stop.connect(stop)
        self._thread = threading.Thread(target=self._answer_replays, name="kv-events-replay", daemon=True)
        self._thread.start()

    def _socket(self, kind: int, endpoint: str, connects: bool = False) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(_HIGH_WATER)
        try:
            socket.connect(endpoint) if connects else socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigurationError(
                f"the endpoint {endpoint} cannot be had: {error}; give one such as tcp://127.0.0.1:5557 or ipc:///PATH"
            ) from error
        return socket

    def publish(self, events: list[Event]) -> None:
        """Send a batch; skip an empty batch."""
        if not events:
            return
        payload = encode(EventBatch(time.time(), events, 0))
        with self._lock:
            number = self._next.to_bytes(8, "big")
            self._next += 1
            self._past.append((number, payload))
            if len(self._past) > self._kept:
                self._past.popleft()
        self._events.send_multipart((self._topic, number, payload))

    def close(self) -> None:
        """Finish the current replay, and close the sockets."""
        self._stop.send(_STOP)
        self._thread.join()
        self._context.destroy()

    def _answer_replays(self) -> None:
        poller = zmq.Poller()
        for socket in (self._stopped, self._replay):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stopped in ready:
                return
            assert self._replay is not None
            asked = self._replay.recv_multipart()
            if len(asked) == 3 and len(asked[2]) == 8:  # ignore other messages: they are not this protocol
                self._answer(asked[0], asked[2])

    def _answer(self, client: bytes, first: bytes) -> None:
        assert self._replay is not None
        with self._lock:
            wanted = [one for one in self._past if one[0] >= first]
            lost = bool(self._past) and first < self._past[0][0]
        for number, payload in wanted:
            self._replay.send_multipart((client, b"", self._topic, number, payload))
        self._replay.send_multipart((client, b"", b"", END, b""))
        if lost:
            self._on_gap()
