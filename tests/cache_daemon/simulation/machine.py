"""Steps of simulated stores: traffic of workers, operators' commands, and faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence

from kvsidecar import keys
from kvsidecar.errors import ChunkNotFound, QuotaExceeded, StoreUnavailable

from cache_daemon.durable.durable_tier import PutOutcome, ReadResult
from cache_daemon.durable.group_commit_writer import GroupCommitWriter
from cache_daemon.remote.circuit_breaker import CircuitState
from tests.cache_daemon.simulation import scene
from tests.cache_daemon.simulation.daemon import Daemon
from tests.cache_daemon.simulation.plan import Catalogue, Step, integers, one_of, step
from tests.cache_daemon.simulation.traffic import Tokens, Traffic, groups, often, prompts, salts, where, who
from tests.cache_daemon.simulation.world import Settings, World


class Machine(Traffic):
    """Steps of a plan: traffic of workers, deletions, pins, deaths of workers, faults, restarts and crashes."""

    def take(self, one: Step) -> None:
        """Take a step, run the simulation for a while, and check the invariants."""
        self.world.say(f"STEP {one}")
        with self.world.ordered(one.order) as order:
            getattr(self, one.name)(**dict(one.arguments))
            self.loop.some_turns(order.random.choice((0, 0, 1, 2, 4, 8, 16, 40)) if one.order else 8)

    # ---- pins and deletions ---------------------------------------------------------------------------------

    @step(at=where, salt=salts, ids=prompts)
    def delete(self, at: int, salt: bytes, ids: Tokens) -> None:
        daemon = self._at(at)
        root = scene.root_of(salt)
        found = daemon.store.probe(root, keys.token_bytes(ids))
        if found:
            key = found[-1][0].key
            daemon.forget(self.world.paths[key])
            assert self._deleted(daemon, root, key) != 0, "what is there was not deleted"
            again = daemon.committed.get(key, -1) > self.world.deleted[-1].at
            if not again:
                with contextlib.suppress(ChunkNotFound):
                    daemon.store.find(root, key)
                    raise AssertionError("a deleted chunk is found")

    @step(at=where, salt=salts)
    def delete_tenant(self, at: int, salt: bytes) -> None:
        daemon = self._at(at)
        self._deleted(daemon, scene.root_of(salt), b"")

    def _deleted(self, daemon: Daemon, root: bytes, key: bytes) -> int | None:
        """Delete a chunk or a tenant; return the number of removed chunks.

        Returns None if the disk hangs or fails, because the daemon then removes the chunks later. Also returns None if
        the chunk was evicted before the call began.
        """
        deleted = self.world.delete(daemon, root, key)
        daemon.deleting.append((root, key))
        try:
            if not key:
                daemon.alive = {(r, p): None for r, p in daemon.alive if r != root}
                for pinned in [p for p in daemon.pinned if p[0] == root]:
                    del daemon.pinned[pinned]
            count = int(daemon.complete(daemon.store.delete(root, key), "a deletion"))
            deleted.is_answered = True
            return count
        except (StoreUnavailable, ChunkNotFound) as error:  # such a deletion need not survive a crash
            if isinstance(error, ChunkNotFound):
                self.world.expect(key not in daemon.listed, "what is there was not found")
            deleted.heard_by = frozenset()
            return None
        finally:
            daemon.deleting.remove((root, key))

    @step(2, at=where, salt=salts, ids=prompts, more=one_of([True, True, False]))
    def pin(self, at: int, salt: bytes, ids: Tokens, more: bool) -> None:
        daemon = self._at(at)
        root = scene.root_of(salt)
        found = daemon.store.probe(root, keys.token_bytes(ids))
        if not found:
            return
        key = found[-1][0].key
        try:
            (daemon.store.pin if more else daemon.store.unpin)(root, key)
        except (QuotaExceeded, ChunkNotFound):
            return
        if more:
            daemon.pinned[root, key] += 1
        elif daemon.pinned[root, key] > 1:
            daemon.pinned[root, key] -= 1
        else:  # a longer chunk may have replaced the pinned one, under another key
            daemon.pinned = Counter({p: n for p, n in daemon.pinned.items() if p[0] != root})

    @step(at=where, salt=salts, group=groups)
    def release_group(self, at: int, salt: bytes, group: str) -> None:
        """Release a group; check that chunks that others used, and pinned chunks, stay."""
        daemon = self._at(at)
        root = scene.root_of(salt)
        before = {c.key for c in daemon.store.tiers.index if c.root != root or c.group != group or not group or c.pins}
        released = daemon.complete(daemon.store.groups.release(root, group), "a release")
        assert not released or group, "chunks without a group were released"
        self.world.say(f"{daemon.name} released {released} chunks of {group}")
        gone = before - daemon.listed.keys()
        assert not gone or daemon.calls, "a release removed chunks of others"

    @step(at=where, n=who)
    def die(self, at: int, n: int) -> None:
        """End a worker with its leases and reservations; another worker attaches."""
        daemon = self._at(at)
        session = daemon.sessions[n]
        daemon.store.close_session(session)
        daemon.held = [h for h in daemon.held if h.session is not session]
        daemon.open = [o for o in daemon.open if o.session is not session]
        daemon.sessions[n] = daemon.attach()

    @step(at=where, seconds=one_of([1.0, 5.0, 60.0, 150.0]))
    def wait(self, at: int, seconds: float) -> None:
        daemon = self._at(at)
        self.loop.wait(seconds)
        daemon.complete(daemon.store.sweep(), "a sweep")

    # ---- disks and networks ---------------------------------------------------------------------------------

    @step(at=where, count=integers(1, 3), full=often)
    def fail_writes(self, at: int, count: int, full: bool) -> None:
        tier = self._at(at).tier
        (tier.fill_up if full else tier.fail_applies)(count)

    @step(at=where, count=integers(1, 2), result=one_of([ReadResult.FAILED, ReadResult.CORRUPT, ReadResult.MISSING]))
    def fail_reads(self, at: int, count: int, result: ReadResult) -> None:
        self._at(at).tier.fault_reads(count, result)

    @step(at=where)
    def hold(self, at: int) -> None:
        self._at(at).tier.hold()

    @step(2, at=where)
    def let_go(self, at: int) -> None:
        self._at(at).tier.let_go()

    @step(at=where, count=integers(0, 3), away=often)
    def fail_network(self, at: int, count: int, away: bool) -> None:
        """Lose answers of the backend, or make it unreachable."""
        network = self._at(at).network
        network.failing, network.is_away = count, away

    @step(2, at=where)
    def mend_network(self, at: int) -> None:
        network = self._at(at).network
        network.failing, network.is_away = 0, False

    @step(2, at=where)
    def settle(self, at: int) -> None:
        """Wait until the daemon has written all chunks that it can write."""
        daemon = self._at(at)
        if not daemon.tier._gate.is_set():
            return
        daemon.complete(daemon.store.settle(), "settling")
        writer = daemon.store._writer
        if not self.world.settings.promises.disk_within_index or writer is None or daemon.calls:
            return
        if daemon.complete(self._all_removed(writer), "what was to be removed"):
            daemon.check_disk()

    @staticmethod
    async def _all_removed(writer: GroupCommitWriter) -> bool:
        while True:
            heard = asyncio.get_running_loop().create_future()
            writer.flush(heard.set_result)
            if (await heard).outcome is not PutOutcome.STORED:
                return False
            # A retried write without space may have made the store evict more chunks meanwhile.
            if not (writer._removals or writer._unflushed.remove):
                return True

    @step(at=where)
    def agree(self, at: int) -> None:
        """Wait until daemons have applied each other's deletions; check that no deleted chunk is left.

        A chunk that a worker has stored again after the deletion may exist.
        """
        daemon = self._at(at)
        if daemon.connection is None or len(self.world.up) < len(self.world.daemons):
            return
        for one in self.world.up:
            one.heal()
        self.loop.wait(60.0)
        for one in self.world.up:
            remote = one.store.remote
            assert remote is not None
            reads, writes = remote._tier.reads, remote._tier.writes
            assert (reads.state, writes.state) != (CircuitState.OPEN, CircuitState.OPEN), (
                "the network works, and nobody uses it"
            )
            for key, since in one.listed.items():
                path, stored = self.world.paths[key], self.world.written.get(key, 0)
                if not self.world.settings.promises.nothing_comes_back:
                    stored = max(stored, since)
                late = [d for d in self.world.deleted if stored < d.at and d.covers(path) and one.name in d.heard_by]
                assert not late, f"{path.tokens} was deleted by {late[0].daemon.name}, and {one.name} has it"

    # ---- the end of a daemon ----------------------------------------------------------------------------------

    @step(at=where, stay=often)
    def restart(self, at: int, stay: bool) -> None:
        """Shut a daemon down and start it again; check that durable chunks, their recency and their pins survive.

        With ``stay``, the daemon stays down if another one is up.
        """
        daemon = self._at(at)
        daemon.quiet()
        daemon.close()
        pinned = daemon.durably_pinned()
        before = {c.key: (c.last_used_at, c.key in pinned) for c in daemon.durable}
        daemon.keep_durable()
        self.world.may_forget(daemon)
        self.world.say(f"{daemon.name} ENDED")
        daemon.before = before
        if not (stay and self.world.up):
            self._start(daemon)

    @step(at=where, stay=often)
    def crash(self, at: int, stay: bool) -> None:
        """Crash a daemon; check at its next start that all chunks that were reported durable survive."""
        daemon = self._at(at)
        durable = [chunk for chunk in daemon.durable if not chunk.write_state.superseder_count]
        daemon.keep_durable()
        daemon.crash()
        self.world.may_forget(daemon)
        self.world.say(f"{daemon.name} CRASHED")
        daemon.told_durable = durable
        if not (stay and self.world.up):
            self._start(daemon)

    @step(2)
    def start(self) -> None:
        """Start the daemons that are down."""
        for daemon in self.world.daemons:
            if not daemon.is_up:
                self._start(daemon)

    def _start(self, daemon: Daemon) -> None:
        before, daemon.before = daemon.before, {}
        told, daemon.told_durable = daemon.told_durable, []
        daemon.start()
        after = {c.key: c for c in daemon.store.tiers.index}
        for key, (used_at, pinned) in before.items():
            tokens = self.world.paths[key].tokens
            assert key in after, f"{tokens} was durable before an orderly end of {daemon.name}, and is lost"
            assert abs(after[key].last_used_at - used_at) < 0.01, (
                f"{tokens}: used at {used_at}, now {after[key].last_used_at}"
            )
            assert (after[key].pins > 0) == pinned, f"a pin of {tokens} is forgotten, or made up"
        for chunk in told:
            # The time of a chunk's last use is stored only now and then, so a chunk with a TTL may expire early.
            brief = chunk.tenant.limits.ttl_seconds is not None
            path = self.world.paths[chunk.key]
            assert chunk.key in after or brief, f"{path.tokens} was told durable, and is lost"
            if brief:
                daemon.forget(path)
        if told or not before:
            daemon.pinned = Counter({p: n for p, n in daemon.pinned.items() if p in daemon.store._pins._pins})

    # ---- end of the simulation ------------------------------------------------------------------------------

    def end(self) -> None:
        """Delete all chunks of all tenants; check that none is left."""
        with self.world.ordered(0):
            self.start()
            for daemon in self.world.daemons:
                daemon.heal()
            self.loop.wait(10.0)
            for daemon in self.world.daemons:
                daemon.quiet()
            for daemon in self.world.daemons:
                self.world.delete(daemon, b"", b"")
                daemon.deleting.append((b"", b""))
                daemon.alive.clear()
                daemon.pinned.clear()
                with contextlib.suppress(StoreUnavailable):  # the disk may not have recovered yet
                    daemon.complete(daemon.store.delete(b"", b""), "the last deletion")
            self.loop.wait(20.0)
            for daemon in self.world.daemons:
                self._end_one(daemon)
        heads = [name for name in self.world.engine.values if name.endswith("/head")]
        assert not heads, "the engine holds what is deleted"

    def _end_one(self, daemon: Daemon) -> None:
        daemon.complete(daemon.store.settle(), "the last settling")
        self.world.check()
        store = daemon.store
        assert not store.tiers.zombies, "a chunk that nobody uses was kept"
        assert store.arena.used_bytes == 0, "a slot leaked"
        if store.gpu is not None:
            assert store.gpu.arena.used_bytes == 0, "a slot of the GPU arena leaked"
        assert not any(daemon.bits), "the summary holds what is deleted"
        stats = store.stats()
        assert (stats.leases, stats.reservations, stats.pinned_bytes, stats.sessions) == (0, 0, 0, 0)
        daemon.close()
        if self.world.settings.durable:
            strangers = daemon.disk.usage().entries
            assert not self.world.settings.promises.disk_within_index or not strangers, "the disk holds what is deleted"
            assert not [n for n in daemon.disk.notes() if n.startswith(b"pin:")], "a pin outlives its chunk"


CATALOGUE = Catalogue(Machine)


def run(plan: Sequence[Step], settings: Settings, ends: bool = True) -> World:
    """Run a whole plan in a new world. Raises AssertionError if a check fails."""
    world = World(settings)
    with world.running():
        machine = Machine(world)
        for one in plan:
            machine.take(one)
        if ends:
            machine.end()
    return world
