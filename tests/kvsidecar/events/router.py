"""The part of a router that follows KV events: it tracks blocks and checks the events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import zmq
from kvsidecar.events.block_hashes import block_hash, external_hash, seed_hash
from kvsidecar.events.event_publisher import END
from kvsidecar.events.vllm_events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch


@dataclass
class Router:
    """Set of known blocks. It computes each block's hash from the tokens, as a router does that knows only prompts."""

    blocks: set[tuple[str | None, int]] = field(default_factory=set)
    _whole: dict[int, bytes] = field(default_factory=dict)  # full hashes by the shortened hashes in events

    def hear(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    gone = {(event.medium, name) for name in event.block_hashes}
                    assert gone <= self.blocks, "blocks are removed that were never there"
                    self.blocks -= gone
                case AllBlocksCleared():
                    self.blocks.clear()

    def _stored(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        last = seed_hash() if parent is None else self._whole[parent]
        salt = event.extra_keys[0][0] if event.extra_keys and event.extra_keys[0] else ""
        assert len(event.token_ids) == size * len(event.block_hashes)
        for i, name in enumerate(event.block_hashes):
            last = block_hash(last, event.token_ids[i * size : (i + 1) * size], "" if i else salt)
            assert name == external_hash(last)
            self._whole[name] = last
            self.blocks.add((event.medium, name))


class Subscriber:
    """A router that is connected to the publisher's sockets."""

    def __init__(self, events: str, replay: str) -> None:
        self.router, self.next = Router(), 0
        self._context = zmq.Context()
        self._events, self._replay = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._events.subscribe(b"")
        self._events.rcvtimeo, self._replay.rcvtimeo = 200, 20_000
        self._events.connect(events)
        self._replay.connect(replay)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def hear_until(self, condition: Callable[[Router], bool]) -> None:
        """Process events until a condition holds, for at most 20 s.

        Requests a replay of missed events. It also requests one if no events arrive, because the subscription may not
        have been established yet.
        """
        deadline = time.monotonic() + 20
        while not condition(self.router):
            assert time.monotonic() < deadline, f"{len(self.router.blocks)} blocks after event {self.next}"
            try:
                _, number, payload = self._events.recv_multipart()
            except zmq.Again:
                self.replay()
                continue
            if int.from_bytes(number, "big") > self.next:
                self.replay()
            self._take(number, payload)

    def replay(self) -> int:
        """Request and process all batches since the last received one; return their number."""
        self._replay.send_multipart((b"", self.next.to_bytes(8, "big")))
        found = 0
        while (frames := self._replay.recv_multipart())[2] != END:
            self._take(*frames[2:])
            found += 1
        return found

    def _take(self, number: bytes, payload: bytes) -> None:
        told = int.from_bytes(number, "big")
        if told >= self.next:  # otherwise a replay has already delivered it
            self.next = told + 1
            self.router.hear(msgspec.msgpack.decode(payload, type=EventBatch).events)
