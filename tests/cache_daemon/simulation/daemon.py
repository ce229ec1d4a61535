"""One simulated daemon, and the test's model of its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from kvsidecar import keys
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import KVSidecarError

from benchmarks.eviction_policies import POLICIES
from cache_daemon.durable.encryption import NullCipher
from cache_daemon.remote import deletion_epochs, tombstones
from cache_daemon.remote.coordinator import RemoteSettings
from cache_daemon.remote.key_schema import KeySchema
from cache_daemon.remote.remote_tier import RemoteTier
from cache_daemon.store.bloom_filter import CountingBloomFilter
from cache_daemon.store.chunk import Chunk, ChunkSnapshot, Residency
from cache_daemon.store.chunk_store import ChunkStore
from cache_daemon.store.sessions import Session
from cache_daemon.store.store_config import StoreConfig
from cache_daemon.store.tenant_accounts import TenantAccounts
from tests.cache_daemon.doubles.faulty_tier import FaultyTier
from tests.cache_daemon.simulation import scene
from tests.cache_daemon.simulation.disk import Disk, Drive, SimulatedArena, SimulatedGpuArena
from tests.cache_daemon.simulation.engine import Connection, Network
from tests.cache_daemon.simulation.ledger import Call, Held, Life, Open, Path
from tests.cache_daemon.simulation.substitution import UNIX_SECONDS
from tests.cache_daemon.simulation.thread import OWNER

if TYPE_CHECKING:
    from tests.cache_daemon.simulation.world import World

_KINDS = {number: name.removeprefix("EVENT_TYPE_") for name, number in pb.EventType.items()}


class Daemon:
    """Starts, stops and crashes a store with its own disk. From the store's events, it keeps a copy of the index."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.disk = Disk(world.loop.hub)
        self.network = Network()
        self.life = Life(is_over=True)
        self.listed: dict[bytes, int] = {}  # chunks that the index must have, and since when
        self.alive: dict[tuple[bytes, tuple[int, ...]], None] = {}  # paths that lookups must find
        self.pinned: Counter[tuple[bytes, bytes]] = Counter()
        self.committed: dict[bytes, int] = {}  # when a chunk last became visible here
        self.corrupt = 0
        self.deleting: list[tuple[bytes, bytes]] = []
        self.before: dict[bytes, tuple[float, bool]] = {}  # durable chunks at a shutdown: time of last use, pinned
        self.told_durable: list[Chunk] = []  # chunks that were reported durable before a crash

    @property
    def is_up(self) -> bool:
        return not self.life.is_over

    # ---- start and end --------------------------------------------------------------------------------------

    def start(self) -> None:
        world = self.world
        self.life = Life()
        before = OWNER.set(self.life)
        try:
            hub = world.loop.hub
            self.drive = Drive(self.disk, hub)
            self.tier = FaultyTier(self.drive)
            self.bits = memoryview(bytearray(64))
            self.connection = Connection(world.engine, self.network) if world.settings.daemons > 1 else None
            self.store = ChunkStore(
                SimulatedArena(scene.ARENA_BYTES, hub), self.tier if world.settings.durable else None,
                StoreConfig(
                    POLICIES[world.settings.policy], scene.DURABLE_BYTES, scene.STAGING_BYTES, scene.INDEX_BYTES,
                    clock=self.clock,
                ),
                accounts=TenantAccounts(lambda tenant: scene.BY_TENANT[tenant]),
                bloom_filter=CountingBloomFilter(self.bits),
                remote=self._remote(),
                gpu_arena=SimulatedGpuArena(scene.GPU_BYTES, hub) if world.settings.device else None,
            )  # fmt: skip
            self.corrupt, self.listed, known = 0, {}, self.listed
            append, life = self.store.events.append, self.life

            def heard(kind: Any, state: ChunkSnapshot) -> None:
                append(kind, state)
                if not life.is_over:  # timers outlive a crash
                    self._heard(kind, state)

            self.store.events.append = heard  # type: ignore[method-assign]
            world.loop.complete(self.store.start(), "the start")
        finally:
            OWNER.reset(before)
        self.listed |= {c.key: known.get(c.key, 0) for c in self.store.tiers.index if c.key not in self.listed}
        self.sessions = [self.attach(), self.attach()]
        self.held: list[Held] = []
        self.open: list[Open] = []
        self.calls: list[Call] = []
        world.say(f"{self.name} OPENED with {len(self.listed)} chunks")

    def _remote(self) -> RemoteSettings | None:
        if self.connection is None:
            return None
        tier = RemoteTier(self.connection, KeySchema("s"), NullCipher(), clock=self.clock)
        return RemoteSettings(tier, self.world.settings.remote_write, None, compress=False)

    def clock(self) -> float:
        return UNIX_SECONDS + self.world.loop.now

    def attach(self) -> Session:
        described = scene.namespace()
        session = self.store.open_session("s", described, keys.namespace_id(described))
        session.reads_gpu = len(self.store.sessions) % 2 == 1
        return session

    def heal(self) -> None:
        """End all faults of disk and network."""
        self.tier._apply_errors.clear()
        self.tier._read_faults.clear()
        self.tier.let_go()
        self.network.is_away, self.network.failing = False, 0

    def quiet(self) -> None:
        """End calls and sessions, as before an orderly shutdown."""
        self.heal()
        self.finish_calls()
        for session in self.sessions:
            self.store.close_session(session)
        self.held, self.open = [], []

    def finish_calls(self) -> None:
        for call in self.calls:
            self.world.loop.until(call.task.done, f"{call.name} of {self.name}")
        self.reap()
        self.complete(self.store._commit.wait_idle(), "a commit that nobody waits for")

    def close(self) -> None:
        self.complete(self.store.close(), "the end")
        self.life.is_over = True

    def crash(self) -> None:
        """Crash the process. Its tasks and threads have no effect any more."""
        life, loop = self.life, self.world.loop
        self.drive.cut()
        if self.connection is not None:
            self.connection.cut()
        life.is_over = True
        self.tier.let_go()
        for _ in range(3):
            for task in list(life.tasks):
                task.cancel()
            loop.wait(0.5)
            if not life.tasks:
                break
        loop.hub.kill([t for t in loop.hub.threads if t.owner is life])
        self.calls, self.held, self.open = [], [], []
        self.deleting.clear()

    def complete(self, work: Coroutine[Any, Any, Any], why: str) -> Any:
        """Run the simulation until a coroutine of this daemon has ended; return its result."""
        before = OWNER.set(self.life)
        try:
            return self.world.loop.complete(work, f"{why} of {self.name}")
        finally:
            OWNER.reset(before)

    # ---- calls ----------------------------------------------------------------------------------------------

    def call(
        self, name: str, session: Session | None, root: bytes, work: Coroutine[Any, Any, Any],
        done: Callable[[Any], None] = lambda _: None,
    ) -> Call:  # fmt: skip
        """Start a call, as if a request had arrived. ``done`` gets the answer when the call ends."""
        begun = False

        async def run() -> None:
            nonlocal begun
            begun = True
            done(await work)

        before = OWNER.set(self.life)
        try:
            call = Call(name, session, root, self.world.loop.create_task(run()))
        finally:
            OWNER.reset(before)
        self.calls.append(call)
        self.world.loop.until(lambda: begun, f"the beginning of {name}")
        return call

    def reap(self) -> None:
        """Record the results of calls that have ended."""
        for call in [c for c in self.calls if c.task.done()]:
            self.calls.remove(call)
            if call.task.cancelled():
                self.world.say(f"{self.name} {call.name} was cancelled")
                continue
            error = call.task.exception()
            if isinstance(error, AssertionError):
                raise error
            if error is not None and not isinstance(error, KVSidecarError):
                raise AssertionError(f"{call.name} of {self.name} raised {type(error).__name__}: {error}") from error
            self.world.say(f"{self.name} {call.name} ended {type(error).__name__ if error else 'well'}")

    # ---- events ---------------------------------------------------------------------------------------------

    def _heard(self, kind: int, state: ChunkSnapshot) -> None:
        world, key = self.world, state.header.prefix_hash
        path, what = world.paths[key], _KINDS[kind]
        world.happened += 1
        world.say(f"{self.name} {what} {path.root[:2].hex()} {path.tokens} from {path.begin}")
        if what == "COMMITTED":
            world.expect(key not in self.listed, f"{path.tokens} is listed twice in {self.name}")
            self.listed[key] = self.committed[key] = world.happened
            self.alive[path.root, path.tokens] = None
            self._check_payload(key)
            self._check_author(key, path)
        elif what == "PROMOTED":
            self._check_payload(key)
        elif what in ("EVICTED", "UNPERSISTED"):
            world.expect(not state.pinned, f"{path.tokens} of {self.name} is pinned, and {what}")
        if what in ("EVICTED", "DELETED"):
            world.expect(key in self.listed, f"{path.tokens} of {self.name} is {what} and was not listed")
            self.listed.pop(key, None)
            if what == "EVICTED" or not self._is_found(path):
                self._check_reason(what, key, path)
                self.forget(path)

    def _check_payload(self, key: bytes) -> None:
        chunk = self.store.tiers.index.get(key)
        assert chunk is not None
        if chunk.slot is not None:
            seen = bytes(self.store.arena.read(chunk.slot))
            self.world.expect(seen == scene.payload_of(key, len(seen)), f"{self.name} shows other bytes than those")

    def _check_author(self, key: bytes, path: Path) -> None:
        """Record that a worker stored a chunk; check that no deletion has covered it since its reservation."""
        found = self.store._reservations._open.get(key)
        if found is None:
            return
        self.world.written[key] = self.world.happened
        reserved_at = self.world.reserved.get(id(found[1]), self.world.happened)
        if self.world.settings.promises.deleted_is_not_committed:
            self.world.expect(
                not any(
                    d.daemon is self and d.is_answered and reserved_at < d.at and d.covers(path)
                    for d in self.world.deleted
                ),
                f"{path.tokens} was reserved before a deletion, and committed after it, in {self.name}",
            )

    def _check_reason(self, what: str, key: bytes, path: Path) -> None:
        """Check that a removed chunk was evicted, deleted or corrupt."""
        if what == "EVICTED" or (path.root, path.tokens) not in self.alive:
            return
        corrupt = self.store.counters.corrupt_chunks > self.corrupt
        named = any(root in (b"", path.root) and (not k or k in path.chain) for root, k in self.deleting)
        elsewhere = any(d.covers(path) for d in self.world.deleted)
        self.world.expect(
            corrupt or named or (self.world.settings.daemons > 1 and elsewhere),
            f"{path.tokens} is gone from {self.name}, and nobody deleted it",
        )

    def _is_found(self, path: Path) -> bool:
        return sum(n for _, n in self.store.tiers.index.match(path.root, path.ids)) == len(path.tokens)

    def forget(self, path: Path) -> None:
        """No longer expect paths through a chunk, because the chunk was evicted or deleted."""
        first = path.tokens[: path.begin + 1]
        self.alive = {(r, p): None for r, p in self.alive if r != path.root or p[: path.begin + 1] != first}
        for root, key in list(self.pinned):
            if root == path.root and self.world.paths[key].tokens[: path.begin + 1] == first:
                del self.pinned[root, key]

    def keep_durable(self) -> None:
        """No longer expect chunks that are not on disk. Call this before the index changes."""
        self.alive = {(r, p): None for r, p in self.alive if self._ends_durably(r, p)}
        tokens = {pin: self.world.paths[pin[1]].tokens for pin in self.pinned}
        self.pinned = Counter({pin: n for pin, n in self.pinned.items() if self._ends_durably(pin[0], tokens[pin])})

    def _ends_durably(self, root: bytes, tokens: tuple[int, ...]) -> bool:
        found = self.store.tiers.index.match(root, keys.token_bytes(tokens))
        return sum(n for _, n in found) == len(tokens) and all(c.disk_state is Residency.PRESENT for c, _ in found)

    def knows(self, root: bytes) -> bool:
        """Return True if the daemon has observed a tenant's deletion epochs in the backend."""
        if not self.is_up:
            return deletion_epochs.NOTE_PREFIX + root in self.disk.notes()
        remote = self.store.remote
        return remote is not None and (not root or root in remote._epochs._tenants)

    def has_to_delete(self, root: bytes) -> bool:
        """Return True if a deletion of the tenant by this daemon waits for the backend."""
        if not self.is_up:
            return any(name.startswith(tombstones.NOTE_PREFIX) for name in self.disk.notes())
        return self.store.remote is not None and self.store.remote._deletions.is_deleting(root)

    def durably_pinned(self) -> set[bytes]:
        """Return the keys of pins that survive a restart, because the pinned chunk is durable.

        A pin that has moved to a longer sibling returns to the chunk that was pinned if only that one is durable.
        """
        index, pins = self.store.tiers.index, self.store._pins._pins_of.values()
        named = [(pin.chunk, index.get(pin.requested_key)) for of_chunk in pins for pin in of_chunk]
        kept = [next((c for c in pair if c is not None and c.disk_state is Residency.PRESENT), None) for pair in named]
        return {c.key for chunk in kept if chunk is not None for c in index.path(chunk)}

    @property
    def durable(self) -> list[Chunk]:
        return [c for c in self.store.tiers.index if c.disk_state is Residency.PRESENT]

    # ---- invariants -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless all invariants hold."""
        self.reap()
        store, tiers = self.store, self.store.tiers
        store.check_integrity()
        differ = {c.key for c in tiers.index} ^ self.listed.keys()
        assert not differ, f"the index of {self.name} is not as told: {[self.world.paths[k].tokens for k in differ]}"
        for held in self.held:
            for chunk, slot, before in held.seen:
                assert chunk.slot == slot, "a leased slot was moved"
                assert store.arena.read(slot) == before, "a leased slot changed"
            for gpu_slot, before in held.seen_on_gpu:
                assert store.gpu is not None
                assert store.gpu.arena.read(gpu_slot) == before, "a leased slot of the GPU arena changed"
        self._check_holders()
        self._check_quotas()
        for root, tokens in self.alive:
            path = Path(root, tokens, 0, ())
            assert self._is_found(path), f"{tokens} is not found to its end in {self.name}"
        for _, key in self.pinned:
            assert self._is_found(self.world.paths[key]), f"{self.world.paths[key].tokens} is pinned and not found"
        self.corrupt = store.counters.corrupt_chunks

    def _check_holders(self) -> None:
        stats = self.store.stats()
        chunks = [*self.store.tiers.index, *self.store.tiers.zombies]
        kept, held = sum(c.leases for c in chunks), sum(len(h.seen) for h in self.held)
        assert kept >= held, "a chunk is leased and not kept"
        if not self.calls:
            assert stats.leases == len(self.held), "leases that nobody holds"
            assert stats.reservations == len(self.open), "reservations that nobody holds"
            if self.connection is None and not self.store._commit._running:
                assert kept == held, "chunks that nobody keeps are kept"

    def _check_quotas(self) -> None:
        tiers = self.store.tiers
        if tiers.disk_quotas is not None:
            assert tiers.index.memory_bytes() <= scene.INDEX_BYTES, "the index's memory is exceeded"
            assert tiers.disk_quotas.used_bytes <= scene.DURABLE_BYTES, "the durable budget is exceeded"
        for salt, limits in scene.LIMITS.items():
            account = self.store.accounts.account_of(keys.tenant_id(salt))
            if limits.arena_bytes is not None:
                assert tiers.arena_quotas.usage_of(account) <= limits.arena_bytes, (
                    "a tenant's quota of the arena is exceeded"
                )
            if limits.store_bytes is not None and tiers.disk_quotas is not None:
                assert tiers.disk_quotas.usage_of(account) <= limits.store_bytes, (
                    "a tenant's quota of the disk is exceeded"
                )
            assert limits.entries is None or account.entries <= limits.entries, "a tenant has too many chunks"
            if self.world.settings.promises.pins_within_quota and limits.pin_bytes is not None:
                assert account.pinned_bytes <= limits.pin_bytes, "a tenant has too much pinned"

    def check_disk(self) -> None:
        """Raise AssertionError unless all chunks on disk are in the index. Call this while no write is in flight."""
        strangers = self.disk.contents - self.listed.keys()
        assert not strangers, f"{[self.world.paths[k].tokens for k in strangers]} is on the disk of {self.name} alone"
