"""Write-behind to a remote tier, and deletions there: one task does both, in order, off everybody's path.

What waits is bounded: what comes while the queue is full is left out, and may come again with its next use. Payloads
are read from the arena when it is their turn; what has left the arena by then is not sent. Chunks go behind their
parents, so that what is found is found from the beginning.

A deletion stops what waits of its tenant at once, keeps everybody here from reading that tenant's chunks there, and is
tried until it is done, also after a restart.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil, inf
from typing import Literal

import structlog
from kvsidecar import keys
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.durable import codec
from cache_daemon.memory.arena import Slot
from cache_daemon.remote import tombstones
from cache_daemon.remote.backend import RemoteBusy, RemoteFailed
from cache_daemon.remote.deletion_epochs import News, TenantMarks
from cache_daemon.remote.deletion_queue import Deletion, Deletions
from cache_daemon.remote.epoch_format import Marks, new_mark
from cache_daemon.remote.remote_record import packed
from cache_daemon.remote.remote_tier import Outgoing, RemoteTier
from cache_daemon.store.chunk import Chunk, Residency
from cache_daemon.store.sessions import Hold
from cache_daemon.store.tier_manager import Tiers

RemoteWrite = Literal["second-use", "all", "never"]
NOTE_PREFIX = b"remote-forget:"
MOST_QUEUED = 4096
_BATCH_CHUNKS, _BATCH_BYTES = 64, 16 << 20
_MOST_KNOWN = 200_000
# How long to wait for a circuit that is open, before it is looked at again.
_PAUSE_SECONDS = 0.25
_TRIES = 2
_LOOK_SECONDS = 2.0

log = structlog.get_logger("cache_daemon")


@dataclass
class SendingCounts:
    """Since the start."""

    dropped: int = 0  # chunks that the queue had no room for, or that could not be sent in their turn
    withheld: int = 0  # times that a chunk was not offered since the engine had just lost its data
    deleted: int = 0  # deletions that were done there
    restored: int = 0  # times that a deletion was done again which the engine had lost


class Sending:
    """``note`` keeps a small value for the next start; None deletes it. ``in_thread`` runs what is heavy, ``told``
    hears what tenants' ``marks`` have to say."""

    def __init__(
        self,
        tiers: Tiers,
        tier: RemoteTier,
        policy: RemoteWrite,
        ttl_seconds: int | None,
        compress: bool,
        in_thread: Callable[[Callable[[], list[Outgoing]]], Awaitable[list[Outgoing]]],
        note: Callable[[bytes, bytes | None], None],
        marks: TenantMarks,
        told: Callable[[bytes, News], None],
    ) -> None:
        self._tiers, self._tier, self._policy, self._ttl = tiers, tier, policy, ttl_seconds
        self._packer = codec.Packer() if compress else None
        self._in_thread, self._note = in_thread, note
        self._queue: OrderedDict[bytes, tuple[Chunk, int]] = OrderedDict()  # by prefix hash; and how often it was tried
        self._known: OrderedDict[bytes, float] = OrderedDict()  # what is there, and when it ends (monotonic)
        self._marks, self._told = marks, told
        self._deletions = Deletions()
        self._generation, self._on_their_way = tier.generation, 0
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self.turn = asyncio.Lock()  # for whoever writes there
        self._idle.set()
        self.counts = SendingCounts()
        tiers.on_unlisted.append(self._unlisted)
        if policy == "all":
            tiers.on_committed.append(self._offer)

    @property
    def pending(self) -> int:
        return len(self._queue) + self._on_their_way

    @property
    def deletions(self) -> int:
        return len(self._deletions)

    # ---- what is to be sent ---------------------------------------------------------------------------------

    def used(self, chunks: Iterable[Chunk]) -> None:
        """Chunks that were found by a prompt, parents before children: their second use at least."""
        if self._policy != "never":
            for chunk in chunks:
                self._offer(chunk)

    def is_there(self, chunk: Chunk, seconds: float) -> None:
        """The engine has the chunk for so many seconds still: it was just brought from there."""
        self._queue.pop(chunk.key, None)
        self._know(chunk.key, seconds)

    def seen(self, root: bytes, marks: Marks) -> News:
        """Hears a tenant's marks in the engine. Where somebody has deleted something there, or may have, what was
        listed here before that is not sent any more. Returns what the marks say."""
        news = self._marks.seen(root, marks)
        if news is not News.NOTHING:
            self._drop_queued(b"" if news is News.EVERYTHING else root)
            if news is not News.CHUNKS:
                self._known.clear()
            self._told(root, news)
        if news is News.LOST and marks.chunks:
            self.seen(root, marks)  # chunks that were deleted meanwhile are news of their own
        return news

    def knows(self, key: bytes) -> bool:
        """Whether a chunk is known to be there, or was not long ago."""
        return key in self._known

    def _offer(self, chunk: Chunk) -> None:
        if chunk.key in self._queue or self._lasts(chunk):
            return
        if self._marks.is_old(chunk):
            return
        if self._marks.is_withheld(chunk):
            self.counts.withheld += 1
            return
        if len(self._queue) >= MOST_QUEUED or self.closed(chunk.root):
            self.counts.dropped += 1
            return
        self._queue[chunk.key] = chunk, 0
        self._stir()

    def _lasts(self, chunk: Chunk) -> bool:
        """Whether the engine is known to have a chunk. At half its time one that is still in use is written once more,
        and so is one that is to be kept for longer now than it was."""
        if self._generation != self._tier.generation:  # it may have lost all that it had
            self._generation = self._tier.generation
            self._known.clear()
        ends = self._known.get(chunk.key)
        if ends is None:
            return False
        ttl = self._ttl_of(chunk)
        return ends == inf or (ttl is not None and ends - time.monotonic() > ttl / 2)

    def _know(self, key: bytes, seconds: float) -> None:
        self._known[key] = time.monotonic() + seconds
        self._known.move_to_end(key)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def _ttl_of(self, chunk: Chunk) -> int | None:
        """The least of the tier's own, the tenant's, and what is left of the time that requests asked for."""
        limits = [n for n in (self._ttl, chunk.tenant.limits.ttl_seconds) if n is not None]
        if chunk.kept_until < inf:
            limits.append(chunk.kept_until - self._tiers.clock())
        return max(1, ceil(min(limits))) if limits else None

    def _unlisted(self, chunk: Chunk) -> None:
        self._queue.pop(chunk.key, None)

    def _drop_queued(self, root: bytes) -> None:
        for key in [key for key, (chunk, _) in self._queue.items() if root in (b"", chunk.root)]:
            del self._queue[key]

    # ---- what is to be deleted ------------------------------------------------------------------------------

    def closed(self, root: bytes) -> bool:
        """Whether a tenant's chunks are being deleted there: until that is done they are not to be read."""
        return self._deletions.concern(root)

    def forget(self, root: bytes, key: bytes, known: bool) -> asyncio.Future[int]:
        """Deletes a chunk with what continues it, without ``key`` a tenant, without ``root`` everything. The future is
        done when it is; its result is how many chunks there were, as far as that is known. A chunk that is not
        ``known`` here is looked up first. Raises LimitExceeded, with nothing done."""
        self._deletions.check(root, key)
        return self._forget_later(root, key, known)

    def _forget_later(self, root: bytes, key: bytes, known: bool) -> asyncio.Future[int]:
        deletion = self._deletions.add(root, key, known)
        if not key:
            self._drop_queued(root)
        self._note(NOTE_PREFIX + root + key, b"\1")
        self._stir()
        return deletion.again or deletion.done

    def restore(self, name: bytes) -> None:
        """Takes up a deletion of an earlier start."""
        rest = name[len(NOTE_PREFIX) :]
        if len(rest) in (0, keys.HASH_BYTES, 2 * keys.HASH_BYTES):
            self._forget_later(rest[: keys.HASH_BYTES], rest[keys.HASH_BYTES :], True)
        else:
            self._note(name, None)

    # ---- the task -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Sends and deletes until it is cancelled."""
        while True:
            await self._wake.wait()
            if not (self._queue or self._deletions or self._tier.spoilt):
                self._wake.clear()
                self._idle.set()
                continue
            if not (self._tier.writes.allows and self._tier.reads.allows):
                self._idle.set()
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            self._idle.clear()
            try:
                async with self.turn:
                    await self._step()
            except RemoteFailed:
                await asyncio.sleep(_PAUSE_SECONDS)
            except Exception:
                log.exception("writing to the remote tier failed, going on")
                await asyncio.sleep(_PAUSE_SECONDS)

    async def settle(self) -> None:
        """Waits until nothing is to be done, or can be done."""
        await self._idle.wait()

    def stir(self) -> None:
        """There may be something to do."""
        if self._tier.spoilt:
            self._stir()

    def _stir(self) -> None:
        self._idle.clear()
        self._wake.set()

    async def _step(self) -> None:
        if self._deletions:
            await self._forget(self._deletions.first())
        elif self._tier.spoilt:
            await self._tier.remove_spoilt()
            self._known.clear()
        else:
            await self._send(self._batch())

    async def _forget(self, deletion: Deletion) -> None:
        root, key, gone = deletion.root, deletion.key, 0
        if key:
            # Walking over all that the engine has of a tenant takes long: not for a hash that nobody knows.
            if deletion.known or await self._tier.holds(root, key):
                gone, left = await tombstones.forget_branch(self._tier, root, key)
                self._marks.left_here(root, left)
        else:
            # Once: what others write from then on is theirs, however often removing the rest is tried.
            if deletion.voided != self._tier.generation:
                await self._void(deletion)
                deletion.voided = self._tier.generation
            await tombstones.purge(self._tier, root)
        if gone or not key:
            self._known.clear()
        self.counts.deleted += 1
        if self._deletions.finished(deletion, gone):
            self._note(NOTE_PREFIX + root + key, None)

    async def _void(self, deletion: Deletion) -> None:
        """Makes a tenant, without ``root`` everything, worthless there. The mark replaces those of other nodes'
        deletions, so they are heard first; it stays the same while it is tried, or it were another node's."""
        root, crossed = deletion.root, False
        deletion.mark = deletion.mark or new_mark(deletion=True)
        if root:
            marks = (await self._tier.marks([root]))[0]
            before = marks.tenant
            if before != deletion.mark:
                crossed = self.seen(root, marks) is News.TENANT
            if marks.chunks is not None and not crossed:  # the names of deleted chunks go, too
                crossed = bool(self._marks.news_of(root, await tombstones.gone(self._tier, root)))
        else:
            before = await self._tier.mark_of_everything()
        await tombstones.void(self._tier, root, deletion.mark)
        # An engine that shows the mark of before has lost the deletion.
        self._marks.made_here(root, deletion.mark, before, crossed=crossed)
        deletion.mark = b""
        if crossed:
            self._told(root, News.TENANT)

    def _batch(self) -> list[Chunk]:
        """The next chunks of one tenant, taken from the queue."""
        out: list[Chunk] = []
        size = 0
        for chunk, _ in islice(self._queue.values(), _BATCH_CHUNKS):
            if out and (chunk.root != out[0].root or size + chunk.size_bytes > _BATCH_BYTES):
                break
            out.append(chunk)
            size += chunk.size_bytes
        return out

    async def _send(self, batch: Sequence[Chunk]) -> None:
        tries = {chunk.key: self._queue.pop(chunk.key)[1] for chunk in batch}
        self._on_their_way = len(batch)
        try:
            await self._write(batch)
        except BaseException as error:
            # Before what came later, and once more only where it was tried.
            more = 0 if isinstance(error, RemoteBusy) else 1
            for chunk in reversed(batch):
                if tries[chunk.key] + more < _TRIES and chunk.listed and not self.closed(chunk.root):
                    self._queue[chunk.key] = chunk, tries[chunk.key] + more
                    self._queue.move_to_end(chunk.key, last=False)
                else:
                    self.counts.dropped += 1
            raise
        finally:
            self._on_their_way = 0

    async def push(self, batch: Sequence[Chunk]) -> tuple[list[Chunk], int]:
        """Writes chunks of one tenant now, whatever the policy; they are held. Returns those that were written, and how
        many were there. Raises RemoteFailed."""
        async with self.turn:
            if self.closed(batch[0].root):
                raise RemoteFailed("a deletion of this tenant is not done there yet")
            for chunk in batch:
                self._queue.pop(chunk.key, None)
            return await self._write(batch, by_command=True)

    async def _write(self, batch: Sequence[Chunk], by_command: bool = False) -> tuple[list[Chunk], int]:
        """Returns those that were written, and how many were there. What goes ``by_command`` is not withheld
        after a loss of the engine's data."""
        root = batch[0].root
        parents = [c.parent_key for c in batch if not c.is_first]
        asked = list(dict.fromkeys([*(c.key for c in batch), *parents]))
        found = await self._tier.find(root, asked, _LOOK_SECONDS)
        if found.mark is None:
            await self._tier.mark(root)
            found = await self._tier.find(root, asked, _LOOK_SECONDS)
        if found.mark is None:
            raise RemoteFailed("it does not keep what it is given")
        news = self.seen(root, found.marks)
        if news is not News.NOTHING and not (by_command and news is News.LOST):
            self.counts.dropped += len(batch)
            return [], 0
        entries = {key: entry for key, entry in zip(asked, found.entries, strict=True) if entry is not None}
        there = set(entries)
        fresh, known = list[Chunk](), 0
        for chunk in batch:
            entry = entries.get(chunk.key)
            if entry is not None and self._tier.lasts(entry, self._ttl_of(chunk)):
                self._know(chunk.key, self._tier.left(entry))
                known += 1
            elif self._sendable(chunk, by_command) and (chunk.is_first or chunk.parent_key in there):
                fresh.append(chunk)
                there.add(chunk.key)
            else:
                self.counts.dropped += 1
        if not fresh:
            return [], known
        hold = Hold(fresh, self._tiers.unused)
        try:
            outgoing = await self._in_thread(self._packing(fresh, found.mark))
        finally:
            hold.give_back()
        await self._tier.store(outgoing)
        for out in outgoing:
            self._know(out.header.prefix_hash, inf if out.ttl_seconds is None else out.ttl_seconds)
        return fresh, known

    def _sendable(self, chunk: Chunk, by_command: bool) -> bool:
        is_from_before = self._marks.is_old(chunk) or (not by_command and self._marks.is_withheld(chunk))
        return chunk.listed and chunk.in_arena is Residency.PRESENT and not is_from_before

    def _packing(self, chunks: Sequence[Chunk], mark: bytes) -> Callable[[], list[Outgoing]]:
        """Work for a thread; all that changes meanwhile is read before."""
        jobs: list[tuple[ChunkHeader, Slot, int | None]] = []
        for chunk in chunks:
            assert chunk.slot is not None, "a resident has a slot"
            jobs.append((chunk.whole_header(), chunk.slot, self._ttl_of(chunk)))
        arena, seal, packer = self._tiers.arena, self._tier.seal, self._packer

        def work() -> list[Outgoing]:
            out = []
            for header, slot, ttl in jobs:
                kind, stored = packed(seal, header, arena.read(slot), packer)
                out.append(Outgoing(header, kind, stored, keys.checksum(stored), ttl, mark))
            return out

        return work
