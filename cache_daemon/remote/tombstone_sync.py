"""Deletions that other nodes have done in a remote tier, also while this node was down: found soon, and done here.

One small value says whether there was any; then the marks of all tenants are read that have something here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from itertools import islice
from math import inf

import structlog
from kvsidecar import keys

from cache_daemon.remote import tombstones
from cache_daemon.remote.backend import RemoteFailed
from cache_daemon.remote.deletion_epochs import News, TenantMarks
from cache_daemon.remote.epoch_format import Marks, new_mark
from cache_daemon.remote.remote_tier import RemoteTier
from cache_daemon.remote.write_behind import Sending
from cache_daemon.store.bulk_ops import Walks
from cache_daemon.store.chunk import Chunk
from cache_daemon.store.yield_timer import Turns

# How often is looked, and for how much longer than looking at all tenants took that is not done again.
_EVERY_SECONDS, _FIRST_SECONDS, _REST = 2.0, 0.25, 10.0
_TENANTS = 128
# A mark that is written back again so soon was contested.
_AGAIN_SECONDS = 600.0

log = structlog.get_logger("cache_daemon")


class Elsewhere:
    """Of one store. ``void`` hears whose look-ups that are under way are worth nothing any more, and with a second
    argument only those that found some of these chunks."""

    def __init__(
        self, tier: RemoteTier, marks: TenantMarks, sending: Sending, walks: Walks, void: Callable[..., None]
    ) -> None:
        self._tier, self._marks, self._sending, self._walks, self._void = tier, marks, sending, walks, void
        self._todo: dict[tuple[bytes, News], float] = {}  # by whose it is, and when it was heard
        self._wake = asyncio.Event()
        self._looked: tuple[int, int, bytes | None] | None = None  # at what everything was looked at
        self._unseen: dict[bytes, None] = {}  # tenants of which something was listed, and whose marks are not known
        self._rests_until = 0.0
        self._written_back: dict[bytes, float] = {}  # when (monotonic), by tenant; everything's under an empty key
        walks.tiers.on_listed.append(self._listed)

    def _listed(self, chunk: Chunk) -> None:
        """A deletion is news to a node only if it has seen the marks of before: it looks at a tenant's as soon as it
        has something of it."""
        if chunk.root not in self._marks:
            self._unseen[chunk.root] = None
            self._wake.set()

    def heard(self, root: bytes, news: News) -> None:
        """Others have deleted something of a tenant: it is done here soon."""
        if news is News.LOST:
            return
        root = b"" if news is News.EVERYTHING else root
        if news is not News.CHUNKS:
            self._void(root)
        if news is News.REVERTED and (root, news) in self._todo:
            return
        self._todo[root, news] = self._marks.heard_at(root)
        self._wake.set()

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        await self._forget_strangers()
        while True:
            self._wake.clear()
            try:
                await self._do()
                await self._look()
            except RemoteFailed:
                log.debug("the remote tier does not say what other nodes have deleted")
            except Exception:
                log.exception("doing what other nodes have deleted failed, going on")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_SECONDS if self._looked is None else _EVERY_SECONDS):
                    await self._wake.wait()

    async def _forget_strangers(self) -> None:
        """Tenants that have nothing on disk any more need not be known."""
        turns = Turns()
        for root in self._marks:
            if not self._walks.page(root, root, 1):
                self._marks.forget(root)
            await turns.give_way()

    # ---- finding out ----------------------------------------------------------------------------------------

    async def _look(self) -> None:
        if not self._tier.reads.allows:
            return
        while self._looked is not None and self._unseen:
            await self._look_at(list(islice(self._unseen, _TENANTS)))
        if time.monotonic() < self._rests_until:
            return
        state = self._tier.generation, self._sending.counts.deleted, await self._tier.deletions()
        if state == self._looked:
            return
        began = time.monotonic()
        if self._marks.is_everything_reverted(await self._tier.mark_of_everything()):
            self.heard(b"", News.REVERTED)
        await self._look_at_all()
        self._looked = state
        self._rests_until = time.monotonic() + _REST * (time.monotonic() - began)

    async def _look_at_all(self) -> None:
        after: bytes | None = b""
        while after is not None:
            roots: list[bytes] = []
            for root in self._walks.roots_from(after):
                if root != after:
                    roots.append(root)
                if len(roots) == _TENANTS:
                    break
            await self._look_at(roots)
            after = roots[-1] if len(roots) == _TENANTS else None
        # Tenants that were deleted here have nothing left here: only their marks tell that the engine forgot it.
        deleted = [root for root in self._marks.with_deletions() if not self._walks.page(root, root, 1)]
        for at in range(0, len(deleted), _TENANTS):
            await self._look_at(deleted[at : at + _TENANTS])

    async def _look_at(self, roots: list[bytes]) -> None:
        for root, marks in zip(roots, await self._tier.marks(roots) if roots else [], strict=True):
            self._sending.seen(root, marks)
            self._unseen.pop(root, None)

    # ---- doing it -------------------------------------------------------------------------------------------

    async def _do(self) -> None:
        """What needs the engine comes last, and may fail."""
        for (root, news), heard in sorted(self._todo.items(), key=lambda one: one[0][1].value, reverse=True):
            if news is News.REVERTED:
                await self._write_back(root)
            elif news is News.CHUNKS:
                await self._drop_chunks(root, heard)
            else:
                dropped = await self._walks.delete(root, None, made_by=heard)
                self._marks.acted_on(root, heard)
                log.info("dropped here what another node has deleted", chunks=dropped)
            if self._todo.get((root, news)) == heard:
                del self._todo[root, news]

    async def _drop_chunks(self, root: bytes, heard: float) -> None:
        gone = await tombstones.gone(self._tier, root)
        async with self._sending.turn:  # what is being written now is known to be there afterwards
            fresh = frozenset(name[: keys.HASH_BYTES] for name in self._marks.news_of(root, gone))
            self._void(root, fresh)
            for key in sorted(fresh):
                chunk = self._walks.find(key)
                if chunk is not None and chunk.root == root:
                    await self._walks.delete(root, chunk)
                if self._sending.knows(key):
                    self._tier.drop(root, key)
            await self._write_back_chunks(root, gone)
        self._sending.stir()
        self._marks.acted_on(root, heard, gone)

    # ---- deletions that the engine has lost -----------------------------------------------------------------

    async def _write_back(self, root: bytes) -> None:
        """Writes deletions that the engine has lost there again: what it had from before them counts no more.

        The very mark comes back, which nodes that know the deletion need not act on. Where two nodes disagree which
        mark is the later one, a second time within minutes, a new deletion ends that.
        """
        async with self._sending.turn:
            everything = Marks(await self._tier.mark_of_everything(), None, None)
            marks = (await self._tier.marks([root]))[0] if root else everything
            for whose, mark in self._marks.lost(root, marks).items():
                again = time.monotonic() - self._written_back.get(whose, -inf) < _AGAIN_SECONDS
                if again:
                    mark = new_mark(deletion=True)
                    self._marks.made_here(whose, mark)
                name = self._tier.names.tenant_mark(whose) if whose else self._tier.names.mark
                await self._tier.write([(name, mark)], None)
                self._written_back[whose] = time.monotonic()
                await tombstones.purge(self._tier, whose)
                self._sending.counts.restored += 1
                log.warning("the remote tier had lost a deletion, which is done there again", everything=not whose)
            if root:
                unmarked = marks.chunks is None and self._marks.has_gone(root)
                await self._write_back_chunks(root, await tombstones.gone(self._tier, root), unmarked)
            await tombstones.tell(self._tier)
        self._sending.stir()

    async def _write_back_chunks(self, root: bytes, gone: set[bytes], unmarked: bool = False) -> None:
        """Writes names of deleted chunks there again; ``gone`` are those that it has, perhaps without their mark."""
        missing = self._marks.missing(root, gone)
        if not missing and not unmarked:
            return
        hashes = frozenset(name[: keys.HASH_BYTES] for name in missing)
        self._void(root, hashes)
        await tombstones.leave(self._tier, root, missing)
        for key in hashes:
            self._tier.drop(root, key)
        self._sending.counts.restored += 1
        log.warning("the remote tier had lost deletions of chunks, which are done there again", chunks=len(hashes))
