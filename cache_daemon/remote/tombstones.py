"""Deletions in the remote tier: epochs, tombstones, and the queue that writes them.

Deleting everything or a tenant replaces its deletion epoch, which invalidates older records. Deleting a chunk with its
subtree leaves a tombstone per chunk. A tombstone stays until the tenant is deleted, because a node that was offline may
return with the chunk at any time. A tenant with too many tombstones is deleted as a whole, together with the
tombstones.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from kvsidecar import keys
from kvsidecar.errors import LimitExceeded

from cache_daemon.remote.deletion_epochs import DeletionEpochs, EpochChange
from cache_daemon.remote.key_schema import TOMBSTONE_ID_BYTES
from cache_daemon.remote.remote_record import new_epoch
from cache_daemon.remote.remote_tier import RemoteTier

NOTE_PREFIX = b"remote-forget:"
# Maximal number of pending deletions, per tenant and in all. The next two limits hold for one external caller and for
# all external callers together, since they can name any number of tenants.
MAX_PER_TENANT, MAX_DELETIONS = 256, 16384
MAX_PER_CALLER, MAX_OF_CALLERS = MAX_DELETIONS // 4, MAX_DELETIONS * 3 // 4

_PAGE, _LOOKUP_TIMEOUT_SECONDS = 256, 2.0
# Maximal number of tombstones per tenant.
MAX_TOMBSTONES = 16384


async def bump_epoch(tier: RemoteTier, root: bytes, epoch: bytes) -> None:
    """Replace a tenant's epoch or, without ``root``, the global one. Raises RemoteFailed.

    This invalidates older records.
    """
    await tier.write(
        [(tier.key_schema.tenant_epoch_key(root) if root else tier.key_schema.global_epoch_key, epoch)], None
    )


async def purge(tier: RemoteTier, root: bytes) -> None:
    """Announce an epoch that ``bump_epoch`` has written, and remove the values that it made invalid.

    Spares a tenant's valid records and its tombstones: nodes may have written them after the epoch. Without ``root``,
    removes everything, the tenants' epochs too. Raises RemoteFailed.
    """
    await announce(tier)
    names = tier.key_schema
    kept = {names.global_epoch_key, names.deletions_epoch_key}
    async for page in tier.scan(names.tenant_prefix(root) if root else names.root_prefix):
        await tier.remove(
            await _invalid_names(tier, root, page) if root else [name for name in page if name not in kept]
        )


async def _invalid_names(tier: RemoteTier, root: bytes, page: Sequence[str]) -> list[str]:
    """Return the names of a tenant that are neither epochs nor tombstones, nor belong to a valid record."""
    names = tier.key_schema
    kept = {names.tenant_epoch_key(root), names.chunks_epoch_key(root)}
    hashes = list(dict.fromkeys(filter(None, (names.hash_of_key(root, name) for name in page))))
    for at in range(0, len(hashes), _PAGE):
        found = await tier.find(root, hashes[at : at + _PAGE], _LOOKUP_TIMEOUT_SECONDS)
        for record in filter(None, found.records):
            key = record.header.prefix_hash
            kept.add(names.record_key(root, key))
            kept.update(names.payload_keys(root, key, record.stored_checksum, record.num_parts))
    return [name for name in page if name not in kept and names.parse_tombstone_key(root, name) is None]


async def delete_subtree(tier: RemoteTier, root: bytes, key: bytes) -> tuple[int, set[bytes]]:
    """Remove a chunk and its descendants, and leave tombstones.

    Removes all payload parts of these chunks, including parts of earlier writes. Returns the number of chunks, and the
    tombstones. Raises RemoteFailed. Scans the backend twice; the first scan remembers only the parent of each chunk and
    the existing tombstones.
    """
    names, begin = tier.key_schema, tier.key_schema.tenant_prefix(root)
    children: dict[bytes, list[bytes]] = {}
    there: set[bytes] = set()
    before: set[bytes] = set()
    async for page in tier.scan(begin):
        hashes = [h for h in (names.hash_of_record_key(root, name) for name in page) if h is not None]
        before.update(filter(None, (names.parse_tombstone_key(root, name) for name in page)))
        for at in range(0, len(hashes), _PAGE):
            found = await tier.find(root, hashes[at : at + _PAGE], _LOOKUP_TIMEOUT_SECONDS)
            for record in filter(None, found.records):
                children.setdefault(record.header.parent_prefix_hash, []).append(record.header.prefix_hash)
                there.add(record.header.prefix_hash)
    doomed = [key]
    for parent in doomed:
        doomed += children.pop(parent, ())
    deleted = set(doomed)
    left = {one + secrets.token_bytes(TOMBSTONE_ID_BYTES) for one in deleted}
    if len(before) + len(left) > MAX_TOMBSTONES:
        await bump_epoch(tier, root, new_epoch(deletion=True))
        await remove_tombstones(tier, root, before)
        await purge(tier, root)
        return len(deleted & there), set()
    await tier.write([(names.tombstone_key(root, name), b"") for name in left], None)
    await tier.remove([names.record_key(root, one) for one in doomed])
    async for page in tier.scan(begin):
        await tier.remove([name for name in page if names.hash_of_key(root, name) in deleted])
    await tier.remove([names.tombstone_key(root, name) for name in before if name[:-TOMBSTONE_ID_BYTES] in deleted])
    # The epoch is written last, so that a node that sees the new epoch finds none of the records.
    await tier.write([(names.chunks_epoch_key(root), new_epoch(deletion=True))], None)
    await announce(tier)
    return len(deleted & there), left


async def read_tombstones(tier: RemoteTier, root: bytes) -> set[bytes]:
    """Read a tenant's tombstones: prefix hash and id of each, as in ``KeySchema``.

    Raises RemoteFailed.
    """
    found: set[bytes] = set()
    async for page in tier.scan(tier.key_schema.tombstone_key(root)):
        found.update(filter(None, (tier.key_schema.parse_tombstone_key(root, name) for name in page)))
    return found


async def write_tombstones(tier: RemoteTier, root: bytes, names: set[bytes]) -> None:
    """Write tombstones and replace the tenant's chunks epoch. Raises RemoteFailed."""
    if names:
        await tier.write([(tier.key_schema.tombstone_key(root, name), b"") for name in names], None)
    await tier.write([(tier.key_schema.chunks_epoch_key(root), new_epoch(deletion=True))], None)


async def remove_tombstones(tier: RemoteTier, root: bytes, names: set[bytes]) -> None:
    """Remove tombstones and the chunks epoch of a deleted tenant. Raises RemoteFailed."""
    schema = tier.key_schema
    await tier.remove([schema.chunks_epoch_key(root), *(schema.tombstone_key(root, name) for name in names)])


async def announce(tier: RemoteTier) -> None:
    """Make all nodes poll the epochs again. Raises RemoteFailed."""
    await tier.write([(tier.key_schema.deletions_epoch_key, new_epoch(deletion=True))], None)


@dataclass(eq=False)
class PendingDeletion:
    """A deletion of a chunk with its subtree, of a tenant, or of everything.

    ``key`` is empty for a tenant. ``key`` and ``root`` are empty for everything. ``is_known`` says that this node has
    the chunk, so the backend may have its descendants even without the chunk itself.
    """

    root: bytes
    key: bytes
    is_known: bool
    done: asyncio.Future[int]
    owner: Hashable | None = None  # the caller, None on the private socket
    started: bool = False
    epoch: bytes = b""  # new epoch of a tenant or of everything; it may already be written
    bumped_generation: int = -1  # backend generation in which the epoch was already bumped
    tombstones: set[bytes] | None = None  # tombstones from before the new epoch, to remove; None without chunks epoch
    repeat: asyncio.Future[int] | None = None  # set if the deletion was requested again after it started


class DeletionQueue:
    """Pending deletions: without duplicates, in order, limited in number. Runs on the event loop."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[tuple[bytes, bytes], PendingDeletion] = OrderedDict()
        self._roots: Counter[bytes] = Counter()
        self._owners: Counter[Hashable] = Counter()  # external callers only

    def __len__(self) -> int:
        return len(self._waiting)

    def concerns(self, root: bytes) -> bool:
        """Return True if a deletion of the tenant, or of everything, is pending."""
        return root in self._roots or b"" in self._roots

    def check(self, root: bytes, key: bytes, owner: Hashable | None) -> None:
        """Raise LimitExceeded when one more deletion would exceed the limit."""
        if (root, key) in self._waiting:
            return
        if key and self._roots[root] >= MAX_PER_TENANT:
            raise LimitExceeded(
                f"{MAX_PER_TENANT} deletions of this tenant wait for the remote tier, the most that may; delete all "
                "of the tenant, or try again when it has done them"
            )
        if owner is not None and (self._owners[owner] >= MAX_PER_CALLER or self._owners.total() >= MAX_OF_CALLERS):
            raise LimitExceeded(
                f"{self._owners[owner]} deletions of this caller wait for the remote tier, and "
                f"{self._owners.total()} of all callers beyond the private socket; at most {MAX_PER_CALLER} and "
                f"{MAX_OF_CALLERS} may; try again when it has done some"
            )
        if len(self._waiting) >= MAX_DELETIONS and (root or key):
            raise LimitExceeded(
                f"{MAX_DELETIONS} deletions wait for the remote tier, the most that may; try again when it has done "
                "some"
            )

    def add(self, root: bytes, key: bytes, known: bool, owner: Hashable | None) -> PendingDeletion:
        """Add a deletion, or return an equal pending deletion."""
        old = self._waiting.get((root, key))
        if old is not None:
            old.is_known = old.is_known or known
            if old.started and old.repeat is None:
                old.repeat = asyncio.get_running_loop().create_future()
            return old
        done = asyncio.get_running_loop().create_future()
        new = self._waiting[root, key] = PendingDeletion(root, key, known, done, owner)
        self._roots[root] += 1
        if owner is not None:
            self._owners[owner] += 1
        return new

    def first(self) -> PendingDeletion:
        """Return the oldest deletion, and mark it as started."""
        found = next(iter(self._waiting.values()))
        found.started = True
        return found

    def finish(self, deletion: PendingDeletion, gone: int) -> bool:
        """Finish a deletion. Returns False if it is queued again.

        A deletion is queued again if it was requested again while it ran.
        """
        if not deletion.done.done():
            deletion.done.set_result(gone)
        if deletion.repeat is not None:
            deletion.done, deletion.repeat = deletion.repeat, None
            deletion.started, deletion.bumped_generation = False, -1
            self._waiting.move_to_end((deletion.root, deletion.key))
            return False
        del self._waiting[deletion.root, deletion.key]
        self._roots[deletion.root] -= 1
        if not self._roots[deletion.root]:
            del self._roots[deletion.root]
        if deletion.owner is not None:
            self._owners[deletion.owner] -= 1
            if not self._owners[deletion.owner]:
                del self._owners[deletion.owner]
        return True


class DeletionWriter:
    """Executes this node's deletions in the remote backend.

    ``enqueue`` and ``restore_note`` add deletions; ``run_next`` executes the oldest one. A deletion is retried until it
    succeeds, even after a restart. ``write_note(key, value)`` persists a small record; None deletes it. Runs on the
    event loop.
    """

    def __init__(
        self, tier: RemoteTier, epochs: DeletionEpochs, write_note: Callable[[bytes, bytes | None], None]
    ) -> None:
        self._tier, self._epochs, self._write_note = tier, epochs, write_note
        self._queue = DeletionQueue()
        self.num_done = 0  # deletions since the start

    def __len__(self) -> int:
        return len(self._queue)

    def is_deleting(self, root: bytes) -> bool:
        """Return True while a deletion of the tenant or of everything is pending.

        The tenant's records must not be read then.
        """
        return self._queue.concerns(root)

    def enqueue(self, root: bytes, key: bytes, *, is_known: bool, owner: Hashable | None = None) -> asyncio.Future[int]:
        """Delete a chunk with its subtree, a tenant without ``key``, everything without ``root``.

        Returns a future of the number of deleted chunks, if known. With ``is_known`` False the writer looks up the
        chunk first. ``owner`` is the external caller whose limit counts; None on the private socket. Raises
        LimitExceeded and then changes nothing.
        """
        self._queue.check(root, key, owner)
        return self._enqueue(root, key, is_known, owner)

    def _enqueue(self, root: bytes, key: bytes, is_known: bool, owner: Hashable | None = None) -> asyncio.Future[int]:
        deletion = self._queue.add(root, key, is_known, owner)
        self._write_note(NOTE_PREFIX + root + key, b"\1")
        return deletion.repeat or deletion.done

    def restore_note(self, name: bytes) -> None:
        """Restore a deletion that was pending before a restart."""
        rest = name[len(NOTE_PREFIX) :]
        if len(rest) in (0, keys.HASH_BYTES, 2 * keys.HASH_BYTES):
            self._enqueue(rest[: keys.HASH_BYTES], rest[keys.HASH_BYTES :], True)
        else:
            self._write_note(name, None)

    async def run_next(self) -> bool:
        """Execute the oldest pending deletion. Returns True if it may have removed records. Raises RemoteFailed."""
        deletion = self._queue.first()
        root, key, gone = deletion.root, deletion.key, 0
        if key:
            # Scanning all records of a tenant takes long, so it is skipped for a hash that neither this node nor the
            # backend knows.
            if deletion.is_known or await self._tier.contains(root, key):
                gone, tombstones = await delete_subtree(self._tier, root, key)
                self._epochs.record_tombstones(root, tombstones)
        else:
            # Replace the epoch only once, even if the removal of older records is retried: records that other nodes
            # write after the replacement are valid.
            if deletion.bumped_generation != self._tier.backend_generation:
                await self._bump_epoch(deletion)
                deletion.bumped_generation = self._tier.backend_generation
            if deletion.tombstones is not None:
                await remove_tombstones(self._tier, root, deletion.tombstones)
                deletion.tombstones = None  # a retry must not remove the chunks epoch of a later deletion
            await purge(self._tier, root)
        self.num_done += 1
        if self._queue.finish(deletion, gone):
            self._write_note(NOTE_PREFIX + root + key, None)
        return bool(gone) or not key

    async def _bump_epoch(self, deletion: PendingDeletion) -> None:
        """Invalidate all records of a tenant or, without ``root``, of everything.

        The new epoch replaces epochs of other nodes' deletions, so this node observes those deletions first. Retries
        use the same epoch; otherwise this node would take the epoch of its first try for another node's deletion.
        """
        root, crossed = deletion.root, False
        deletion.epoch = deletion.epoch or new_epoch(deletion=True)
        if root:
            epochs = (await self._tier.read_epochs([root]))[0]
            before = epochs.tenant_epoch
            if before != deletion.epoch:
                crossed = self._epochs.observe(root, epochs) is EpochChange.TENANT_DELETED
                has_tombstones = epochs.chunks_epoch is not None
                deletion.tombstones = await read_tombstones(self._tier, root) if has_tombstones else None
            crossed = crossed or bool(self._epochs.unapplied_tombstones(root, deletion.tombstones or set()))
        else:
            before = await self._tier.read_global_epoch()
        await bump_epoch(self._tier, root, deletion.epoch)
        # If the backend shows the previous epoch later, it has lost the deletion.
        self._epochs.record_own_deletion(root, deletion.epoch, before, crossed=crossed)
        deletion.epoch = b""
        if crossed:
            self._epochs.notify(root, EpochChange.TENANT_DELETED)
