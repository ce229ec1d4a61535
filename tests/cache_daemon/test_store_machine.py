"""The store as a state machine: whatever happens in whatever order, its invariants hold."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from cache_daemon.arena import MemoryArena
from cache_daemon.device_arena import DeviceArena
from cache_daemon.device_memory import HostMemory
from cache_daemon.session import Session
from cache_daemon.summary import SummaryWriter
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kvsidecar import keys
from kvsidecar.errors import KVSidecarError
from kvsidecar.layout import new_header

from cache_daemon.durable import MemoryTier
from cache_daemon.store import ChunkStore, Match, Reserved
from tests.cache_daemon.conftest import GEOMETRY, descriptor, payload_of

ARENA_BYTES = 10 * 4096
DURABLE_BYTES = 12 * 3000
token = st.integers(0, 2)
prompts = st.lists(token, min_size=1, max_size=8)


class StoreMachine(RuleBasedStateMachine):
    """Two sessions store, match, release, abort, delete, pin and die, in a store of ten slots."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.store = self.run(self._open())
        self.descriptor = descriptor()
        self.namespace = keys.namespace_id(self.descriptor)
        self.sessions: list[Session] = [self.open(), self.open()]
        self.held: list[tuple[Session, Match, bytes]] = []
        self.reserved: list[tuple[Session, Reserved, list[int]]] = []

    async def _open(self) -> ChunkStore:
        self.summary = memoryview(bytearray(64))
        writer = SummaryWriter(self.summary, Path("never-mapped"))
        return ChunkStore(MemoryArena(ARENA_BYTES), MemoryTier(), DURABLE_BYTES, summary=writer)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def open(self) -> Session:
        return self.store.open_session("s", self.descriptor, self.namespace)

    def tick(self) -> None:
        """Lets the writer's thread report."""
        self.run(asyncio.sleep(0.001))

    @rule(who=st.integers(0, 1), ids=prompts)
    def reserve(self, who: int, ids: list[int]) -> None:
        """Reserves the continuation of what is stored, as a worker does."""
        session = self.sessions[who]
        found = [(c, n) for c, n in self.store.probe(self.namespace, ids) if n == len(c.header.token_ids)]
        at = sum(n for _, n in found)
        if at == len(ids):
            return
        header = new_header(GEOMETRY, ids[at:], at)
        header.parent_prefix_hash = found[-1][0].key if found else b""
        result = self.store.reserve(session, b"", [header])[0]
        if result.slot is not None:
            self.reserved.append((session, result, ids[at:]))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), sound=st.booleans())
    def commit(self, data: st.DataObject, sound: bool) -> None:
        session, result, ids = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        assert result.slot is not None
        view = self.store.arena.read(result.slot)
        view[:] = payload_of(ids, len(view))
        checksum = keys.checksum(view) ^ (not sound)
        try:
            self.store.commit(session, [(result.lease_id, checksum, self.store.epoch)])
            assert sound
        except KVSidecarError:
            assert not sound

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        session, result, _ = self.reserved.pop(data.draw(st.integers(0, len(self.reserved) - 1)))
        assert self.store.abort(session, [result.lease_id]) == 1

    @rule(who=st.integers(0, 1), ids=prompts)
    def match(self, who: int, ids: list[int]) -> None:
        session = self.sessions[who]
        result = self.run(self.store.match(session, b"", ids))
        at = 0
        for m in result.matches:
            assert m.chunk.slot is not None
            view = self.store.arena.read(m.chunk.slot)
            tokens = list(m.chunk.header.token_ids)
            assert tokens[: m.tokens] == ids[at : at + m.tokens]
            assert view == payload_of(tokens, len(view)), "a reader sees other bytes than were committed"
            self.held.append((session, m, bytes(view)))
            at += m.tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        session, m, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        assert self.store.release(session, [m.lease_id]) == 1

    @rule(ids=prompts)
    def delete(self, ids: list[int]) -> None:
        found = self.store.probe(self.namespace, ids)
        if found:
            assert self.store.delete(self.namespace, b"", found[-1][0].key) >= 1

    @rule(ids=prompts, count=st.sampled_from([1, -1]))
    def pin(self, ids: list[int], count: int) -> None:
        found = self.store.probe(self.namespace, ids)
        if found:
            self.store.pin(self.namespace, found[-1][0].key, count)

    @rule(who=st.integers(0, 1))
    def die(self, who: int) -> None:
        session = self.sessions[who]
        self.store.close_session(session)
        self.held = [h for h in self.held if h[0] is not session]
        self.reserved = [r for r in self.reserved if r[0] is not session]
        self.sessions[who] = self.open()

    @rule()
    def wait(self) -> None:
        self.tick()

    @invariant()
    def all_is_accounted_for(self) -> None:
        if hasattr(self, "store"):
            self.store.check_integrity()
            for _, m, before in self.held:
                assert m.chunk.slot is not None
                assert self.store.arena.read(m.chunk.slot) == before, "a leased slot changed"
            stats = self.store.stats()
            assert stats.leases == len(self.held)
            assert stats.reservations == len(self.reserved)
            assert stats.durable_bytes <= DURABLE_BYTES
            assert stats.corrupt_chunks == 0

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        for session in self.sessions:
            self.store.close_session(session)
        self.store.delete(b"", b"", b"")
        for _ in range(2000):
            if self.store.stats().pending_writes == 0:
                break
            self.tick()
        self.tick()
        self.store.check_integrity()
        assert self.store.arena.used_bytes == 0, "a slot leaked"
        assert self.store.summary is None or not any(self.summary), "the summary holds what is deleted"
        self.store.close()
        self.loop.close()


class DeviceStoreMachine(StoreMachine):
    """The same over an arena in device memory."""

    async def _open(self) -> ChunkStore:
        arena = DeviceArena(HostMemory(ARENA_BYTES), Path("never-listened-on"))
        return ChunkStore(arena, MemoryTier(), DURABLE_BYTES)


StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
DeviceStoreMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
TestStore = StoreMachine.TestCase
TestDeviceStore = DeviceStoreMachine.TestCase
