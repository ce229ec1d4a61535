"""A simulation: daemons, their shared remote backend, and the log of all events."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import cache_daemon.remote.remote_prefetcher as fetch
from tests.cache_daemon.doubles.memory_engine import InMemoryBackend
from tests.cache_daemon.simulation.loop import Order, SimulatedLoop
from tests.cache_daemon.simulation.substitution import Substitution
from tests.cache_daemon.simulation.thread import OWNER

if TYPE_CHECKING:
    from tests.cache_daemon.simulation.daemon import Daemon
    from tests.cache_daemon.simulation.ledger import Path


@dataclass(frozen=True)
class Promises:
    """Guarantees of the store that the simulation checks.

    A guarantee is False as long as a known defect of the store breaks it. F2 and F7 are the project's numbers of such
    defects.
    """

    listed_once: bool = True
    """A fetch from the remote tier may load a chunk that a worker has reserved (F2)."""
    disk_within_index: bool = True
    """After all writes, every chunk on disk is in the index, too (F7, orphans)."""
    deleted_is_not_committed: bool = True
    """After the answer to a deletion, no chunk that was reserved before the deletion is committed (F7)."""
    nothing_comes_back: bool = False
    """If a daemon deletes a chunk while another daemon writes it to the backend, no fetch loads the chunk again."""
    crossing_deletions_heard: bool = True
    """A daemon applies another daemon's deletion of a tenant, even while its own deletion of the tenant waits for the
    backend. (Its own deletion epoch may replace the other epoch before the daemon has seen it.)"""
    pins_within_quota: bool = True
    """When a pin moves to a longer chunk, its tenant's pins stay within ``pin_bytes``."""
    strangers_deleted: bool = False
    """A daemon applies the deletion of a tenant whose deletion epochs it has never seen. This is a known limit (see
    docs/adr/079-deletions-on-every-node.md): a daemon reads the epochs only after it has a chunk of the tenant."""


@dataclass(frozen=True)
class Settings:
    """Configuration of a simulation."""

    policy: str = "gittins"
    daemons: int = 1
    durable: bool = True
    device: bool = False
    remote_write: Any = "all"
    promises: Promises = field(default_factory=Promises)


@dataclass
class Deleted:
    """A requested deletion: of a chunk with its subtree, of a tenant, or of all tenants."""

    daemon: Daemon
    root: bytes
    key: bytes
    at: int
    heard_by: frozenset[str]  # daemons that must apply the deletion
    is_answered: bool = False  # with success; before that, chunks in flight may still arrive

    def covers(self, path: Path) -> bool:
        return self.root in (b"", path.root) and (not self.key or self.key in path.chain)


class World:
    """Runs the steps of a simulation. ``expect`` records broken guarantees, which fail the step at its end."""

    def __init__(self, settings: Settings) -> None:
        from tests.cache_daemon.simulation.daemon import Daemon

        self.settings, self.log, self.broken = settings, list[str](), list[str]()
        self.loop = SimulatedLoop()
        self.loop.set_task_factory(_new_task)
        self._substitution = Substitution(self.loop, self.say, self.broken.append)
        self.paths: dict[bytes, Path] = {}
        self.happened = 0
        self.is_over = False
        self.deleted: list[Deleted] = []
        self.written: dict[bytes, int] = {}  # when a worker last stored a chunk on any daemon
        self.reserved: dict[int, int] = {}  # when a reservation was made, by ``id`` of its object
        self.engine = InMemoryBackend(part_bytes=6 * 4096, clock=self.loop.time)
        self.daemons = [Daemon(self, name) for name in "AB"[: settings.daemons]]

    def say(self, text: str) -> None:
        if not self.is_over:
            self.log.append(f"{self.loop.now:.6f} {text}")

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.broken.append(otherwise)

    @contextmanager
    def running(self) -> Iterator[World]:
        """Install the substitutes and start the daemons; undo this at the end of the ``with`` block."""
        before, fetch._MIN_TOKENS = fetch._MIN_TOKENS, 1  # the simulation's prompts are short
        self._substitution.begin()
        self.loop.enter()
        try:
            for daemon in self.daemons:
                daemon.start()
            yield self
        finally:
            self.is_over = True
            for daemon in self.daemons:
                daemon.life.is_over = True
            self.loop.cancel()
            self._substitution.end()
            fetch._MIN_TOKENS = before
            self.loop.end()

    @contextmanager
    def ordered(self, number: int) -> Iterator[Order]:
        """Use an order during a step; check all invariants after it."""
        self.loop.order = order = Order(number)
        yield order
        self.check()

    def check(self) -> None:
        self._raise_broken()
        for daemon in self.daemons:
            if daemon.is_up:
                daemon.check()
        self._raise_broken()

    def _raise_broken(self) -> None:
        assert not self.broken, "; ".join(self.broken)
        assert not self.loop.errors, "; ".join(self.loop.errors)

    def delete(self, daemon: Daemon, root: bytes, key: bytes) -> Deleted:
        """Record the start of a deletion."""
        self.happened += 1
        promises = self.settings.promises
        heard_by = frozenset(
            d.name
            for d in self.daemons
            if (promises.strangers_deleted or d is daemon or d.knows(root))
            and (promises.crossing_deletions_heard or d is daemon or not d.has_to_delete(root))
        )
        self.deleted.append(Deleted(daemon, root, key, self.happened, heard_by))
        return self.deleted[-1]

    def may_forget(self, daemon: Daemon) -> None:
        """Expect no effect of the deletions of a daemon that ends without a disk, because it loses pending ones."""
        for deleted in self.deleted:
            if deleted.daemon is daemon and not self.settings.durable:
                deleted.heard_by = frozenset()

    @property
    def up(self) -> Sequence[Daemon]:
        return [d for d in self.daemons if d.is_up]

    @property
    def digest(self) -> str:
        """Hash of the whole log."""
        return hashlib.sha256("\n".join(self.log).encode()).hexdigest()


def _new_task(loop: Any, work: Any, **given: Any) -> Any:
    """Create a task that ends when the daemon that owns it ends."""
    import asyncio

    task = asyncio.Task(work, loop=loop, **given)
    life = OWNER.get()
    if life is not None:
        life.tasks[task] = None
        task.add_done_callback(life.tasks.pop)
    return task


def settings_of(seed: int, promises: Promises | None = None) -> Settings:
    """Derive a configuration from a seed: policy, number of daemons, kind of arena, with or without a disk."""
    from benchmarks.eviction_policies import POLICIES

    policies = sorted(POLICIES)
    found = Settings(
        policy=policies[seed % len(policies)],
        daemons=1 + seed % 2,
        durable=seed % 8 != 5,
        device=seed % 4 == 2,
        remote_write="second-use" if seed % 6 == 3 else "all",
    )
    return found if promises is None else replace(found, promises=promises)
