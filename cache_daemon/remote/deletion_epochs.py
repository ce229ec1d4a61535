"""Deletion epochs that this node has observed, kept over its restarts.

Nodes never compare clocks. A node treats every chunk that it inserted before it observed a new deletion epoch as older
than that deletion. It keeps the latest deletion epochs, and digests of earlier epochs. If the backend returns an
earlier epoch or none, the backend has lost a deletion (a failover, a restored backup, a restart without data). The node
then writes its epoch back.
"""

from __future__ import annotations

import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from kvsidecar import keys

from cache_daemon.remote.key_schema import TOMBSTONE_ID_BYTES
from cache_daemon.remote.remote_record import EPOCH_BYTES, TenantEpochs, epoch_digest, is_deletion_epoch

if TYPE_CHECKING:
    from cache_daemon.store.chunk import Chunk

NOTE_PREFIX = b"remote-mark:"
TOMBSTONES_PREFIX = b"remote-gone:"
_NOTE = struct.Struct(f"<{EPOCH_BYTES}s{EPOCH_BYTES}s{EPOCH_BYTES}s?")
_NONE = bytes(EPOCH_BYTES)
_MAX_TENANTS = 100_000
_MAX_EXAMINED = 4  # records that may be dropped when a full table gets another one
# Number of digests of earlier epochs that are kept per tenant.
_MAX_PAST = 8
# After a loss of data, nodes write back known deletions. For this time older chunks are not written (``is_withheld``).
GRACE_SECONDS = 60.0


class EpochChange(Enum):
    """Difference between a tenant's epochs and the last observed epochs."""

    NONE = auto()
    EPOCH_LOST = auto()  # the backend lost the epochs, perhaps of deletions: older chunks are not written for a while
    DELETION_LOST = auto()  # the backend lost a deletion known here: no record is valid until the write-back
    CHUNKS_DELETED = auto()  # single chunks of the tenant were deleted
    TENANT_DELETED = auto()  # the whole tenant was deleted
    ALL_DELETED = auto()


@dataclass(slots=True)
class _TenantRecord:
    """Last observed epochs of a tenant, as digests.

    Times are monotonic seconds. A chunk that this node inserted before ``deleted_at`` predates the deletion.
    """

    global_digest: bytes
    tenant_digest: bytes
    chunks_digest: bytes
    deleted_at: float = 0.0
    lost_at: float = 0.0  # when a loss of data was observed, or the time of the restart after it; 0: never
    unsure_until: float = 0.0  # chunks inserted before this time may have been deleted
    unapplied_since: float = 0.0  # when this node observed a change that it has not applied yet; 0: none
    tombstones: set[bytes] = field(default_factory=set)  # tombstones that this node applied
    deletion_epoch: bytes = b""  # the tenant's epoch itself, if a deletion made it
    past_digests: tuple[bytes, ...] = ()  # digests of the tenant's earlier epochs

    def has_lost_deletion(self, tenant: bytes, deletion: bool, chunks: bytes) -> bool:
        """Return True if a backend with these digests has lost a known deletion."""
        if tenant != self.tenant_digest and ((self.deletion_epoch and not deletion) or tenant in self.past_digests):
            return True
        return bool(self.tombstones) and not chunks and tenant in (b"", self.tenant_digest)


class DeletionEpochs:
    """Observed deletion epochs of at most ``_MAX_TENANTS`` tenants, and of all tenants with chunks here.

    Without the record of a tenant, this node would miss the next deletion of its chunks. ``has_chunks`` says whether
    this node has chunks of a tenant. ``write_note(key, value)`` persists a small record; None deletes it. A change is
    persisted after it was applied, so that a crash leaves no deleted chunks in place. ``on_change`` holds subscribers.
    Used on the event loop.
    """

    def __init__(
        self, write_note: Callable[[bytes, bytes | None], None], has_chunks: Callable[[bytes], bool] = lambda _: False
    ) -> None:
        self._write_note, self._has_chunks = write_note, has_chunks
        self.on_change: list[Callable[[bytes, EpochChange], None]] = []
        self._tenants: OrderedDict[bytes, _TenantRecord] = OrderedDict()
        self._global_digest: bytes | None = None  # None: never observed
        self._global_deletion_epoch = b""  # the epoch itself, if a deletion made it
        self._past_global_digests: tuple[bytes, ...] = ()
        self._all_deleted_at = 0.0
        self._forgotten_deleted_at = 0.0  # latest deletion time of tenants that were dropped from the table

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._tenants))

    def __contains__(self, root: bytes) -> bool:
        return root in self._tenants

    def predates_deletion(self, chunk: Chunk) -> bool:
        """Return True if the chunk is older than a remote deletion that may concern it."""
        record = self._tenants.get(chunk.root)
        of_tenant = self._forgotten_deleted_at if record is None else max(record.deleted_at, record.unsure_until)
        return chunk.inserted_at <= max(of_tenant, self._all_deleted_at)

    def is_withheld(self, chunk: Chunk) -> bool:
        """Return True while a chunk that predates a loss of data must not be written."""
        record = self._tenants.get(chunk.root)
        return (
            record is not None
            and chunk.inserted_at <= record.lost_at
            and time.monotonic() < record.lost_at + GRACE_SECONDS
        )

    def observe(self, root: bytes, epochs: TenantEpochs) -> EpochChange:
        """Compare a tenant's epochs with the last observed epochs; notify ``on_change`` of a difference."""
        change = self.compare(root, epochs)
        if change is not EpochChange.NONE:
            self.notify(root, change)
        if change is EpochChange.EPOCH_LOST:
            self.observe(root, epochs)  # deletions of chunks, before or after the loss, are a separate change
        return change

    def notify(self, root: bytes, change: EpochChange) -> None:
        """Call the subscribers in the order in which they were added."""
        for call in self.on_change:
            call(root, change)

    def compare(self, root: bytes, epochs: TenantEpochs) -> EpochChange:
        """Compare a tenant's epochs with the last observed epochs, and remember the new epochs."""
        now = time.monotonic()
        if self.is_global_deletion_lost(epochs.global_epoch):
            return EpochChange.DELETION_LOST
        global_change = self._observe_global(epochs.global_epoch, now)
        tenant, chunks = epoch_digest(epochs.tenant_epoch), epoch_digest(epochs.chunks_epoch)
        deletion = is_deletion_epoch(epochs.tenant_epoch)
        before = self._tenants.get(root)
        if before is None or before.global_digest != self._global_digest:
            # A deletion of everything includes deletions of single chunks.
            change = EpochChange.CHUNKS_DELETED if chunks and global_change is EpochChange.NONE else EpochChange.NONE
            known = () if before is None else (before.tenant_digest, *before.past_digests)
            if before is not None and deletion and global_change is EpochChange.NONE and tenant not in known:
                change = EpochChange.TENANT_DELETED  # perhaps later than chunks that followed a deletion of everything
            after = _TenantRecord(self._global_digest or b"", tenant, chunks, deleted_at=self._forgotten_deleted_at)
            after.past_digests = () if before is None else _append_digest(before.past_digests, before.tenant_digest)
        elif before.has_lost_deletion(tenant, deletion, chunks):
            self._tenants.move_to_end(root)
            return global_change if global_change is not EpochChange.NONE else EpochChange.DELETION_LOST
        else:
            change = _compare(before, tenant, deletion, chunks)
            if change is EpochChange.NONE and (before.tenant_digest or not tenant):
                self._tenants.move_to_end(root)
                return global_change
            after = replace(
                before, tenant_digest=tenant or before.tenant_digest, chunks_digest=chunks or before.chunks_digest
            )
        if deletion and epochs.tenant_epoch is not None:
            after.deletion_epoch = epochs.tenant_epoch
        if before is not None and after.tenant_digest != before.tenant_digest:
            after.past_digests = _append_digest(after.past_digests, before.tenant_digest)
        if change is EpochChange.CHUNKS_DELETED:
            after.unsure_until = after.unapplied_since = now
        elif change is EpochChange.EPOCH_LOST:
            after.lost_at = now  # the next comparison reports deletions of chunks
            after.chunks_digest = after.chunks_digest if before is None else before.chunks_digest
        elif change is EpochChange.TENANT_DELETED:
            after.deleted_at = after.unapplied_since = now
            after.chunks_digest, after.tombstones = chunks, set()
        self._remember(root, after)
        return global_change if global_change is not EpochChange.NONE else change

    def is_global_deletion_lost(self, epoch: bytes | None) -> bool:
        """Return True if a global epoch shows that a known deletion was lost."""
        value = epoch_digest(epoch)
        return bool(self._global_deletion_epoch) and value != self._global_digest and (
            not value or value in self._past_global_digests
        )  # fmt: skip

    def _observe_global(self, epoch: bytes | None, now: float) -> EpochChange:
        value = epoch_digest(epoch)
        if value == self._global_digest or (not value and self._global_digest is not None):
            return EpochChange.NONE
        first = self._global_digest is None
        self._adopt_global(value, epoch)
        if first:
            self._persist_global()
            return EpochChange.NONE
        self._all_deleted_at = now
        return EpochChange.ALL_DELETED

    def _adopt_global(self, value: bytes, epoch: bytes | None) -> None:
        self._past_global_digests = _append_digest(self._past_global_digests, self._global_digest or b"")
        self._global_digest = value
        self._global_deletion_epoch = epoch if epoch is not None and is_deletion_epoch(epoch) else b""

    def _remember(self, root: bytes, record: _TenantRecord) -> None:
        before = self._tenants.get(root)
        if before is not None and before.tombstones and not record.tombstones:
            self._write_note(TOMBSTONES_PREFIX + root, None)
        elif before is None:
            self._drop_oldest()
        self._tenants[root] = record
        self._tenants.move_to_end(root)
        self._persist(root)

    def _drop_oldest(self) -> None:
        """Drop tenants without chunks from a full table, least recently observed first."""
        for _ in range(min(_MAX_EXAMINED, len(self._tenants))):
            if len(self._tenants) < _MAX_TENANTS:
                return
            oldest, gone = self._tenants.popitem(last=False)
            if self._has_chunks(oldest):
                self._tenants[oldest] = gone
            else:
                self._forgotten_deleted_at = max(self._forgotten_deleted_at, gone.deleted_at, gone.unsure_until)
                self._erase(oldest)

    # ---- deletions ------------------------------------------------------------------------------------------

    def record_own_deletion(
        self, root: bytes, epoch: bytes, before: bytes | None = None, *, crossed: bool = False
    ) -> None:
        """Record this node's own deletion of a tenant or, without ``root``, of everything.

        ``epoch`` replaced the epoch ``before``. ``crossed`` says that this node had not applied an earlier deletion by
        another node: it must then remove all chunks of the tenant that it has inserted so far.
        """
        now = time.monotonic()
        if not root:
            self._past_global_digests = _append_digest(self._past_global_digests, epoch_digest(before))
            self._adopt_global(epoch_digest(epoch), epoch)
            self._all_deleted_at = now
            self._persist_global()
            return
        record = self._tenants.get(root)
        past = () if record is None else _append_digest(record.past_digests, record.tenant_digest)
        after = _TenantRecord(
            self._global_digest or b"", epoch_digest(epoch), b"", deleted_at=now, deletion_epoch=epoch
        )
        after.past_digests = _append_digest(past, epoch_digest(before))
        after.unapplied_since = now if crossed else 0.0 if record is None else record.unapplied_since
        self._remember(root, after)

    def record_tombstones(self, root: bytes, gone: set[bytes]) -> None:
        """Record tombstones that this node wrote or has applied, so that it does not apply them again.

        Of a chunk that was deleted more than once, it keeps only the new tombstone.
        """
        record = self._tenants.get(root)
        if record is None:
            return
        replaced = {name[: keys.HASH_BYTES] for name in gone}
        merged = {name for name in record.tombstones if name[: keys.HASH_BYTES] not in replaced} | gone
        if merged != record.tombstones:
            record.tombstones = merged
            self._write_note(TOMBSTONES_PREFIX + root, b"".join(sorted(merged)))

    def unapplied_tombstones(self, root: bytes, gone: set[bytes]) -> set[bytes]:
        """Return the tombstones of a tenant that were not applied yet."""
        record = self._tenants.get(root)
        return gone if record is None else gone - record.tombstones

    def has_tombstones(self, root: bytes) -> bool:
        """Return True if tombstones of the tenant are known."""
        record = self._tenants.get(root)
        return record is not None and bool(record.tombstones)

    def missing_tombstones(self, root: bytes, gone: set[bytes]) -> set[bytes]:
        """Return known tombstones that the backend has lost."""
        record = self._tenants.get(root)
        if record is None:
            return set()
        there = {name[: keys.HASH_BYTES] for name in gone}
        return {name for name in record.tombstones if name[: keys.HASH_BYTES] not in there}

    def lost_deletions(self, root: bytes, epochs: TenantEpochs) -> dict[bytes, bytes]:
        """Return the deletion epochs to write back, by tenant root; the key of the global epoch is b""."""
        out: dict[bytes, bytes] = {}
        if self.is_global_deletion_lost(epochs.global_epoch):
            out[b""] = self._global_deletion_epoch
        record = self._tenants.get(root)
        tenant, deletion = epoch_digest(epochs.tenant_epoch), is_deletion_epoch(epochs.tenant_epoch)
        if (
            record is None
            or record.global_digest != self._global_digest
            or not record.deletion_epoch
            or tenant == record.tenant_digest
        ):
            return out
        if not deletion or tenant in record.past_digests:
            out[root] = record.deletion_epoch
        return out

    def tenants_with_deletions(self) -> list[bytes]:
        """Return the tenants with a known deletion."""
        return [root for root, record in self._tenants.items() if record.deletion_epoch or record.tombstones]

    def is_epoch_lost(self, root: bytes, epochs: TenantEpochs) -> bool:
        """Return True if the backend had an epoch of the tenant, and has none now."""
        record = self._tenants.get(root)
        return epochs.tenant_epoch is None and record is not None and bool(record.tenant_digest)

    def observed_at(self, root: bytes) -> float:
        """Return the monotonic time at which a tenant's unapplied deletion was observed; without a record, now."""
        if not root:
            return self._all_deleted_at
        record = self._tenants.get(root)
        return time.monotonic() if record is None else record.unapplied_since

    def mark_applied(self, root: bytes, heard: float) -> None:
        """Record that this node has applied the deletion of ``root``, or of everything, observed at ``heard``."""
        if not root:
            self._persist_global()
            return
        record = self._tenants.get(root)
        if record is not None and record.unapplied_since == heard:
            record.unapplied_since = record.unsure_until = 0.0
            self._persist(root)

    # ---- over restarts --------------------------------------------------------------------------------------

    def _persist_global(self) -> None:
        epoch = self._global_deletion_epoch or _NONE
        self._write_note(NOTE_PREFIX, (self._global_digest or _NONE) + epoch + b"".join(self._past_global_digests))

    def _persist(self, root: bytes) -> None:
        record = self._tenants[root]
        if not record.unapplied_since:
            value = _NOTE.pack(record.global_digest, record.tenant_digest, record.chunks_digest, bool(record.lost_at))
            value += (record.deletion_epoch or _NONE) + b"".join(record.past_digests)
            self._write_note(NOTE_PREFIX + root, value)

    def restore(self, name: bytes, value: bytes) -> None:
        """Restore a deletion record that an earlier run stored; remove it if it is unreadable.

        Call it once durable chunks are indexed.
        """
        if name.startswith(TOMBSTONES_PREFIX):
            self._restore_tombstones(name, value)
            return
        root = name[len(NOTE_PREFIX) :]
        size = _NOTE.size if root else EPOCH_BYTES
        rest = [value[at : at + EPOCH_BYTES] for at in range(size, len(value), EPOCH_BYTES)]
        whole = len(value) >= size and all(len(one) == EPOCH_BYTES for one in rest) and len(rest) <= _MAX_PAST + 1
        if not whole or len(root) not in (0, keys.HASH_BYTES):
            self._write_note(name, None)
            return
        epoch, past = (_read(rest[0]), tuple(rest[1:])) if rest else (b"", ())
        if not root:
            self._global_digest = _read(value[:size])
            self._global_deletion_epoch, self._past_global_digests = epoch, past
            return
        global_change, tenant, chunks, lost = _NOTE.unpack(value[:size])
        since = time.monotonic() if lost else 0.0
        record = _TenantRecord(
            _read(global_change), _read(tenant), _read(chunks), lost_at=since, deletion_epoch=epoch, past_digests=past
        )
        record.tombstones = self._tenants[root].tombstones if root in self._tenants else set()
        self._tenants[root] = record

    def _restore_tombstones(self, name: bytes, value: bytes) -> None:
        root, size = name[len(TOMBSTONES_PREFIX) :], keys.HASH_BYTES + TOMBSTONE_ID_BYTES
        if len(root) != keys.HASH_BYTES or len(value) % size:
            self._write_note(name, None)
            return
        record = self._tenants.setdefault(root, _TenantRecord(b"", b"", b""))
        record.tombstones = {value[at : at + size] for at in range(0, len(value), size)}

    def forget(self, root: bytes) -> None:
        """Forget a tenant without chunks, unless a deletion of the tenant is known.

        A known deletion stays, because this node must write it back if the backend loses it.
        """
        record = self._tenants.get(root)
        if record is not None and not record.deletion_epoch and not record.tombstones:
            del self._tenants[root]
            self._erase(root)

    def _erase(self, root: bytes) -> None:
        self._write_note(NOTE_PREFIX + root, None)
        self._write_note(TOMBSTONES_PREFIX + root, None)


def _compare(before: _TenantRecord, tenant: bytes, deletion: bool, chunks: bytes) -> EpochChange:
    if tenant and tenant != before.tenant_digest and (deletion or before.tenant_digest):
        return EpochChange.TENANT_DELETED if deletion else EpochChange.EPOCH_LOST
    return EpochChange.CHUNKS_DELETED if chunks and chunks != before.chunks_digest else EpochChange.NONE


def _append_digest(past: tuple[bytes, ...], value: bytes) -> tuple[bytes, ...]:
    if not value:
        return past
    return (*(one for one in past if one != value), value)[-_MAX_PAST:]


def _read(value: bytes) -> bytes:
    return b"" if value == _NONE else value
