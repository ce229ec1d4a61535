"""The store as a state machine: whatever happens in whatever order, and whatever the disk does, its promises hold."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Set

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import ChunkNotFound, KVSidecarError, QuotaExceeded, StoreUnavailable
from kvsidecar.layout import new_header

from cache_daemon.durable.tier import ReadResult
from cache_daemon.memory.arena import Arena
from cache_daemon.memory.device_arena import DeviceArena
from cache_daemon.memory.device_memory import HostMemory
from cache_daemon.store import facade, walks, writing
from cache_daemon.store.lookup import MatchResult
from tests.cache_daemon.machine import (
    _LIFE_STEPS,
    ARENA_BYTES,
    DURABLE_BYTES,
    GEOMETRY,
    LIMITS,
    PAGE,
    Ground,
    Open,
    few,
    payload_of,
    prompts,
    rarely,
    salts,
    ttls,
    who,
)


class StoreMachine(Ground):
    """Two sessions of four tenants store, match, release, abort, delete, pin and die, with calls that overlap and are
    cancelled, over a disk that fails, waits and loses, and a daemon that is restarted and killed."""

    # ---- writing --------------------------------------------------------------------------------------------

    @rule(n=who, salt=salts, ids=prompts, cut=st.integers(1, 8), ttl=ttls)
    def reserve(self, n: int, salt: bytes, ids: list[int], cut: int, ttl: int = 0) -> None:
        """Reserves what is missing of a prompt, in two chunks if it is cut, to be kept for so long."""
        session, root = self.sessions[n], self.root(salt)
        whole = [(c, t) for c, t in self.store.probe(root, keys.token_bytes(ids)) if t == c.tokens]
        at = sum(t for _, t in whole)
        parent = whole[-1][0].key if whole else b""
        headers, ends = [], []
        for end in sorted({min(at + cut, len(ids)), len(ids)} - {at}):
            header = new_header(GEOMETRY, ids[at:end], at)
            header.parent_prefix_hash = parent
            parent = keys.prefix_hash(parent or root, ids[at:end])
            headers.append(header)
            ends.append(end)
            at = end
        until = self.store.terms.until(ttl)
        for end, got in zip(ends, self.store.reserve(session, salt, headers, until), strict=True):
            if got.staged is not None:
                assert session.staging is not None
                view = session.staging.view(got.staged)
                view[:] = payload_of(got.prefix_hash, len(view))
                begin = end - len(view) // PAGE
                self.paths[got.prefix_hash] = (root, tuple(ids[:end]), begin)
                self.open.append(Open(session, root, tuple(ids[:end]), got))

    @rule(n=who, salt=salts, many=st.lists(prompts, min_size=2, max_size=8), cut=st.integers(1, 8))
    def save(self, n: int, salt: bytes, many: list[list[int]], cut: int) -> None:
        """Stores prompts one after the other, as a worker does."""
        for ids in many:
            self.reserve(n, salt, ids, cut)
            if any(o.session is self.sessions[n] for o in self.open):
                self.commit(n, frozenset(), 4, True, False)

    @rule(n=who, unsound=few, most=st.integers(1, 4), wait=st.booleans(), late=rarely)
    def commit(self, n: int, unsound: Set[int], most: int, wait: bool, late: bool) -> None:
        """Commits some of a session's reservations, oldest first; a ``late`` writer scribbles meanwhile."""
        session = self.sessions[n]
        chosen = [o for o in self.open if o.session is session][:most]
        if not chosen:
            return
        self.open = [o for o in self.open if o not in chosen]
        assert session.staging is not None
        views = [session.staging.view(o.got.staged) for o in chosen if o.got.staged is not None]
        items = [
            (o.got.reservation_id, keys.checksum(view) ^ (i in unsound))
            for i, (o, view) in enumerate(zip(chosen, views, strict=True))
        ]

        before = len(self.removed)

        def done(outcomes: list[int]) -> None:
            for i, (one, outcome) in enumerate(zip(chosen, outcomes, strict=True)):
                assert (outcome == pb.COMMIT_OUTCOME_CHECKSUM_MISMATCH) <= (i in unsound or late), "a sound one refused"
                assert (outcome == pb.COMMIT_OUTCOME_COMMITTED) <= (i not in unsound), "an unsound one accepted"
                if outcome == pb.COMMIT_OUTCOME_COMMITTED:
                    self.alive.add((one.root, one.path))
            for key in self.removed[before:]:  # meanwhile
                self._forget(key)

        async def begin() -> None:
            call = self.call(session, self.store.commit(session, self.store.epoch, items), done)
            if late:
                await asyncio.sleep(0)
                for view in views:
                    view[:] = b"\xee" * len(view)
            if wait and not self.tier_is_held:
                done(await call.task)
                self.calls.remove(call)
            self._note_events()

        self.run(begin())

    @rule(which=st.integers(0, 7))
    def abort(self, which: int) -> None:
        if not self.open:
            return
        one = self.open.pop(which % len(self.open))
        assert self.store.abort(one.session, [one.got.reservation_id, b"unknown"]) == 1

    # ---- reading --------------------------------------------------------------------------------------------

    @rule(n=who, salt=salts, ids=prompts, elsewhere=st.booleans(), wait=st.booleans(), ttl=ttls)
    def match(self, n: int, salt: bytes, ids: list[int], elsewhere: bool, wait: bool, ttl: int = 0) -> None:
        session, root, until = self.sessions[n], self.root(salt), self.store.terms.until(ttl)
        halves = [(0, len(ids)), (len(ids) // 2, len(ids) - len(ids) // 2)] if elsewhere else []

        def done(result: MatchResult) -> None:
            self._check_match(session, root, ids, result)

        async def begin() -> None:
            asked = self.store.match(session, salt, keys.token_bytes(ids), halves, until=until)
            call = self.call(session, asked, done)
            if wait and not self.tier_is_held:
                self.calls.remove(call)
                done(await call.task)

        self.run(begin())

    @rule(n=who, salt=salts, many=st.lists(prompts, min_size=2, max_size=8))
    def read(self, n: int, salt: bytes, many: list[list[int]]) -> None:
        """Reads prompts one after the other, as a worker does."""
        for ids in many:
            self.match(n, salt, ids, False, True)
            if self.held and not self.tier_is_held:
                self.held.remove(last := self.held[-1])
                assert self.store.release(last.session, [last.result.lease_id]) == 1

    @rule(which=st.integers(0, 7))
    def release(self, which: int) -> None:
        if not self.held:
            return
        held = self.held.pop(which % len(self.held))
        assert self.store.release(held.session, [held.result.lease_id, b"unknown"]) == 1

    @rule(salt=salts, ids=prompts)
    def fetch(self, salt: bytes, ids: list[int]) -> None:
        """Reads one chunk as a stream does."""
        found = self.store.probe(self.root(salt), keys.token_bytes(ids))
        if not found:
            return
        chunk = found[-1][0]

        async def read() -> None:
            async with self.store.reading(chunk) as payload:
                assert bytes(payload) == payload_of(chunk.key, chunk.size_bytes)

        self.call(self.sessions[0], read(), lambda _: None)

    # ---- calls that overlap ---------------------------------------------------------------------------------

    @rule(which=st.integers(0, 7), spins=st.integers(0, 6))
    def cancel(self, which: int, spins: int) -> None:
        """A caller goes away, somewhere in the middle of its call."""
        if not self.calls:
            return
        call = self.calls.pop(which % len(self.calls))

        async def end() -> None:
            for _ in range(spins):
                await asyncio.sleep(0)
            call.task.cancel()
            try:
                result = await call.task
            except (asyncio.CancelledError, KVSidecarError):
                return
            call.done(result)  # it was faster

        self.run(end())

    @rule(spins=st.integers(1, 5))
    def go_on(self, spins: int) -> None:
        """Lets calls and threads make some progress."""

        async def spin() -> None:
            for _ in range(spins):
                await asyncio.sleep(0.0005)
            for call in [c for c in self.calls if c.task.done()]:
                self.calls.remove(call)
                with contextlib.suppress(KVSidecarError):
                    call.done(call.task.result())

        self.run(spin())

    # ---- keeping and removing -------------------------------------------------------------------------------

    @rule(salt=salts, ids=prompts)
    def delete(self, salt: bytes, ids: list[int]) -> None:
        root = self.root(salt)
        found = self.store.probe(root, keys.token_bytes(ids))
        if found:
            chunk = found[-1][0]
            self._gone(chunk.key)
            with contextlib.suppress(StoreUnavailable):  # while the disk hangs or fails: it is removed later
                assert self.run(self.store.delete(root, chunk.key)) >= 1
            with pytest.raises(ChunkNotFound):
                self.store.find(root, chunk.key)

    @rule(salt=salts, ids=prompts, more=st.booleans())
    def pin(self, salt: bytes, ids: list[int], more: bool) -> None:
        root = self.root(salt)
        found = self.store.probe(root, keys.token_bytes(ids))
        if found:
            with contextlib.suppress(QuotaExceeded, ChunkNotFound):
                (self.store.pin if more else self.store.unpin)(root, found[-1][0].key)

    @rule(n=who)
    def die(self, n: int) -> None:
        """A worker goes, with all that it holds; another one comes."""
        session = self.sessions[n]
        self.store.close_session(session)
        self.held = [h for h in self.held if h.session is not session]
        self.open = [o for o in self.open if o.session is not session]
        self.sessions[n] = self.attach()

    @rule(seconds=st.sampled_from([1.0, 60.0, 150.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.run(self.store.sweep())

    # ---- the disk, and the end of the daemon ----------------------------------------------------------------

    @rule(count=st.integers(1, 3), full=st.booleans())
    def fail_writes(self, count: int, full: bool) -> None:
        (self.tier.fill_up if full else self.tier.fail_applies)(count)

    @rule(count=st.integers(1, 2), result=st.sampled_from([ReadResult.FAILED, ReadResult.CORRUPT, ReadResult.MISSING]))
    def fail_reads(self, count: int, result: ReadResult) -> None:
        self.tier.fault_reads(count, result)

    @rule()
    def hold(self) -> None:
        self.tier.hold()

    @rule()
    def let_go(self) -> None:
        self.tier.let_go()

    @rule()
    def settle(self) -> None:
        if self.tier_is_held:
            return

        async def wait() -> None:
            async with asyncio.timeout(30):
                await self.store.settle()

        self.run(wait())

    @rule()
    def restart(self) -> None:
        """An orderly end: what was durable is there again, with when it was used and whether it is pinned."""
        if self.steps < _LIFE_STEPS:
            return

        async def close() -> dict[bytes, tuple[float, bool]]:
            await self._stop()
            await self.store.close()  # which may write, and for that evict
            await asyncio.sleep(0.001)
            await self._hear()
            self._note_events()
            self.following.cancel()
            return {c.key: (c.used_at, c.pins > 0) for c in self.durable()}

        before = self.run(close())
        self.alive = {(r, p) for r, p in self.alive if self._ends_durably(r, p)}
        self.run(self._open())
        after = {c.key: (c.used_at, c.pins > 0) for c in self.store.tiers.index}
        lost = [self.paths[key] for key in set(before) - set(after)]
        assert not lost, f"{lost} was durable before an orderly end and is lost after {self.told[-60:]}"
        for key, (used_at, pinned) in before.items():
            assert abs(after[key][0] - used_at) < 0.01, (
                f"{self.paths[key][1:]}: used at {used_at}, found as {after[key][0]} after {self.told[-60:]}"
            )
            assert after[key][1] == pinned, "a pin is forgotten"

    @rule()
    def kill(self) -> None:
        """A sudden end: what was told durable is found, with whatever the disk was doing."""
        if self.steps < _LIFE_STEPS:
            return
        self._note_events()
        durable = list(self.durable())
        self.alive = {(r, p) for r, p in self.alive if self._ends_durably(r, p)}
        self.tier.fail_applies(10_000)  # a dead daemon writes nothing more
        self.tier.let_go()
        self.run(self._abandon())
        self.run(self._open())
        index = self.store.tiers.index
        found = {c.key for c in index}
        for chunk in durable:
            # When a chunk was used last is written down now and then: one with a time to live may end early.
            brief = chunk.tenant.limits.ttl_seconds is not None
            assert chunk.key in found or chunk.superseded or brief, (
                f"{self.paths[chunk.key][1:]} was told durable and is lost after {self.told[-60:]}"
            )
            if brief:
                self._forget(chunk.key)

    # ---- what always holds ----------------------------------------------------------------------------------

    @invariant()
    def all_is_accounted_for(self) -> None:
        if not hasattr(self, "store"):
            return
        self.hear_all()
        self.steps += 1
        self._note_events()
        self.store.check_integrity()
        for held in self.held:
            for chunk, slot, before in held.seen:
                assert chunk.slot == slot, "a leased slot was moved"
                assert self.store.arena.read(slot) == before, "a leased slot changed"
        stats = self.store.stats()
        if not self.calls:
            assert stats.leases == len(self.held), "leases that nobody holds"
            assert stats.reservations == len(self.open), "reservations that nobody holds"
            kept = sum(c.leases for c in [*self.store.tiers.index, *self.store.tiers.detached])
            assert kept == sum(len(held.seen) for held in self.held), "chunks that nobody keeps are kept"

    @invariant()
    def nobody_has_more_than_allowed(self) -> None:
        if not hasattr(self, "store"):
            return
        tiers = self.store.tiers
        assert tiers.cold is not None
        assert tiers.cold.used_bytes <= DURABLE_BYTES, "the durable budget is exceeded"
        for salt, limits in LIMITS.items():
            account = self.store.accounts.of(keys.tenant_id(salt))
            if limits.arena_bytes is not None and limits.store_bytes is not None:
                assert tiers.hot.used_by(account) <= limits.arena_bytes, "a tenant's quota of the arena is exceeded"
                assert tiers.cold.used_by(account) <= limits.store_bytes, (
                    f"a tenant's quota of the disk is exceeded after {self.told[-60:]}"
                )
            assert limits.entries is None or account.entries <= limits.entries, (
                f"a tenant has too many chunks after {self.told[-60:]}"
            )
            assert limits.pin_bytes is None or account.pinned_bytes <= limits.pin_bytes, "a tenant has too much pinned"

    @invariant()
    def what_can_be_found_stays(self) -> None:
        """Whatever was committed is found until it is evicted or deleted by name, also by a longer sibling's end."""
        if not hasattr(self, "store"):
            return
        for root, path in self.alive:
            found = sum(n for _, n in self.store.probe(root, keys.token_bytes(path)))
            assert found == len(path), f"{found} of {len(path)} tokens are found of {path} after {self.told[-40:]}"


class DeviceStoreMachine(StoreMachine):
    """The same over an arena in device memory."""

    def arena(self) -> Arena:
        return DeviceArena(HostMemory(ARENA_BYTES))


SETTINGS = {"deadline": None, "report_multiple_bugs": False, "suppress_health_check": list(HealthCheck)}
StoreMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, **SETTINGS)
DeviceStoreMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=50, **SETTINGS)


@pytest.fixture(autouse=True)
def _a_second_is_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facade, "_TICK_SECONDS", 0.001)
    monkeypatch.setattr(writing, "_PATIENCE_SECONDS", 0.02)
    monkeypatch.setattr(writing, "_STEP_SECONDS", 0.005)
    monkeypatch.setattr(walks, "_WRITTEN_SECONDS", 0.01)


class TestStore(StoreMachine.TestCase): ...


class TestDeviceStore(DeviceStoreMachine.TestCase): ...
