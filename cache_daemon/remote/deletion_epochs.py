"""Deletion marks of a remote engine that this node has seen, kept over its restarts.

No clock of another node plays a part: a chunk that was listed here before a new mark was seen is from before the
deletion, whenever that was. A node keeps the marks of deletions themselves, and digests of the marks that came before
them: an engine that shows an older mark, or none, has lost a deletion (a failover, a restored backup, a restart without
data), and the node writes the mark back.
"""

from __future__ import annotations

import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from kvsidecar import keys

from cache_daemon.remote.epoch_format import Marks, digest, of_deletion
from cache_daemon.remote.key_schema import GONE_ID_BYTES
from cache_daemon.remote.remote_record import MARK_BYTES
from cache_daemon.store.chunk import Chunk

NOTE_PREFIX = b"remote-mark:"
GONE_PREFIX = b"remote-gone:"
_NOTE = struct.Struct(f"<{MARK_BYTES}s{MARK_BYTES}s{MARK_BYTES}s?")
_NONE = bytes(MARK_BYTES)
_MOST = 100_000
# Digests of earlier marks that are remembered of a tenant.
_MAX_PAST = 8
# After an engine lost its data, nodes that know of deletions write them back; until then nobody offers older chunks.
GRACE_SECONDS = 60.0


class News(Enum):
    """What marks say that are others than before."""

    NOTHING = auto()
    LOST = auto()  # the engine has lost them, and may have lost deletions: older chunks are not offered for a while
    REVERTED = auto()  # the engine has lost a deletion that is known here: nothing counts until it is written back
    CHUNKS = auto()  # single chunks of the tenant were deleted
    TENANT = auto()  # all of the tenant
    EVERYTHING = auto()


@dataclass(slots=True)
class _Known:
    """Of a tenant: digests of marks, and what of it was listed here up to when (monotonic) and is not to be written."""

    everything: bytes
    tenant: bytes
    chunks: bytes
    since: float = 0.0
    lost: float = 0.0  # when the engine was seen to have lost its data; 0: never. After a restart, when that was
    unsure: float = 0.0  # up to when it may be among the chunks that were deleted
    heard: float = 0.0  # when there was news that have not been acted on; 0: no such
    gone: set[bytes] = field(default_factory=set)  # of deleted chunks what was acted on
    deletion: bytes = b""  # the tenant's mark itself, where a deletion made it
    past: tuple[bytes, ...] = ()  # digests of the tenant's marks before this one

    def is_behind_of(self, tenant: bytes, deletion: bool, chunks: bytes) -> bool:
        """True if an engine with these digests has lost a known deletion."""
        if tenant != self.tenant and ((self.deletion and not deletion) or tenant in self.past):
            return True
        return bool(self.gone) and not chunks and tenant in (b"", self.tenant)


class TenantMarks:
    """Deletion marks by tenant, at most ``_MOST`` of them.

    ``note`` keeps a small value for the next start; None deletes it. News are written down when they were acted on, or
    a sudden end would leave what was deleted. Runs on the event loop.
    """

    def __init__(self, note: Callable[[bytes, bytes | None], None]) -> None:
        self._note = note
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._everything: bytes | None = None  # its digest; None: never seen
        self._everything_mark = b""  # the mark itself, where a deletion made it
        self._everything_past: tuple[bytes, ...] = ()
        self._all_since = 0.0
        self._unknown_since = 0.0  # for tenants that are not remembered any more

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._known))

    def __contains__(self, root: bytes) -> bool:
        return root in self._known

    def is_old(self, chunk: Chunk) -> bool:
        """Whether a chunk was listed here before the last deletion elsewhere that may concern it."""
        known = self._known.get(chunk.root)
        of_tenant = self._unknown_since if known is None else max(known.since, known.unsure)
        return chunk.made_at <= max(of_tenant, self._all_since)

    def is_withheld(self, chunk: Chunk) -> bool:
        """True while a chunk from before a loss of the engine's data is not offered again."""
        known = self._known.get(chunk.root)
        return known is not None and chunk.made_at <= known.lost and time.monotonic() < known.lost + GRACE_SECONDS

    def seen(self, root: bytes, marks: Marks) -> News:
        """Compares the marks that the engine has now with those of the last time. Returns what has happened since."""
        now = time.monotonic()
        if self.is_everything_reverted(marks.everything):
            return News.REVERTED
        everything = self._seen_everything(marks.everything, now)
        tenant, chunks, deletion = digest(marks.tenant), digest(marks.chunks), of_deletion(marks.tenant)
        before = self._known.get(root)
        if before is None or before.everything != self._everything:
            # Where everything was deleted, that is all there is to do.
            news = News.CHUNKS if chunks and everything is News.NOTHING else News.NOTHING
            after = _Known(self._everything or b"", tenant, chunks, since=self._unknown_since)
            after.past = () if before is None else _remembered(before.past, before.tenant)
        elif before.is_behind_of(tenant, deletion, chunks):
            self._known.move_to_end(root)
            return everything if everything is not News.NOTHING else News.REVERTED
        else:
            news = _compared(before, tenant, deletion, chunks)
            if news is News.NOTHING and (before.tenant or not tenant):
                self._known.move_to_end(root)
                return everything
            after = replace(before, tenant=tenant or before.tenant, chunks=chunks or before.chunks)
        if deletion and marks.tenant is not None:
            after.deletion = marks.tenant
        if before is not None and after.tenant != before.tenant:
            after.past = _remembered(after.past, before.tenant)
        if news is News.CHUNKS:
            after.unsure = after.heard = now
        elif news is News.LOST:
            after.lost, after.chunks = now, after.chunks if before is None else before.chunks  # heard next time
        elif news is News.TENANT:
            after.since = after.heard = now
            after.chunks, after.gone = chunks, set()
        self._remember(root, after)
        return everything if everything is not News.NOTHING else news

    def is_everything_reverted(self, mark: bytes | None) -> bool:
        """True if an engine with this mark has lost a known deletion of everything."""
        value = digest(mark)
        return bool(self._everything_mark) and value != self._everything and (
            not value or value in self._everything_past
        )  # fmt: skip

    def _seen_everything(self, mark: bytes | None, now: float) -> News:
        value = digest(mark)
        if value == self._everything or (not value and self._everything is not None):
            return News.NOTHING
        first = self._everything is None
        self._adopt_everything(value, mark)
        if first:
            self._write_down_everything()
            return News.NOTHING
        self._all_since = now
        return News.EVERYTHING

    def _adopt_everything(self, value: bytes, mark: bytes | None) -> None:
        self._everything_past = _remembered(self._everything_past, self._everything or b"")
        self._everything, self._everything_mark = value, mark if mark is not None and of_deletion(mark) else b""

    def _remember(self, root: bytes, known: _Known) -> None:
        before = self._known.get(root)
        if before is not None and before.gone and not known.gone:
            self._note(GONE_PREFIX + root, None)
        self._known[root] = known
        self._known.move_to_end(root)
        self._write_down(root)
        if len(self._known) > _MOST:
            oldest, gone = self._known.popitem(last=False)
            self._unknown_since = max(self._unknown_since, gone.since, gone.unsure)
            self._erase(oldest)

    # ---- deletions ------------------------------------------------------------------------------------------

    def made_here(self, root: bytes, mark: bytes, before: bytes | None = None, *, crossed: bool = False) -> None:
        """Notes that this node has deleted a tenant, without ``root`` everything, which has ``mark`` now and had the
        mark ``before``. With ``crossed``, other nodes have deleted something of the tenant before: what was listed here
        by now is to go."""
        now = time.monotonic()
        if not root:
            self._everything_past = _remembered(self._everything_past, digest(before))
            self._adopt_everything(digest(mark), mark)
            self._all_since = now
            self._write_down_everything()
            return
        known = self._known.get(root)
        past = () if known is None else _remembered(known.past, known.tenant)
        after = _Known(self._everything or b"", digest(mark), b"", since=now, deletion=mark)
        after.past = _remembered(past, digest(before))
        after.heard = now if crossed else 0.0 if known is None else known.heard
        self._remember(root, after)

    def left_here(self, root: bytes, gone: set[bytes]) -> None:
        """Notes chunks of a tenant that this node has deleted: they need not be acted on."""
        known = self._known.get(root)
        if known is not None:
            self._set_gone(root, known, gone)

    def news_of(self, root: bytes, gone: set[bytes]) -> set[bytes]:
        """Returns which of a tenant's deleted chunks were not acted on yet."""
        known = self._known.get(root)
        return gone if known is None else gone - known.gone

    def has_gone(self, root: bytes) -> bool:
        """Whether deletions of single chunks of a tenant are known."""
        known = self._known.get(root)
        return known is not None and bool(known.gone)

    def missing(self, root: bytes, gone: set[bytes]) -> set[bytes]:
        """Returns the names of deleted chunks that are known here, and that the engine does not have any more."""
        known = self._known.get(root)
        if known is None:
            return set()
        there = {name[: keys.HASH_BYTES] for name in gone}
        return {name for name in known.gone if name[: keys.HASH_BYTES] not in there}

    def lost(self, root: bytes, marks: Marks) -> dict[bytes, bytes]:
        """Returns the marks of deletions to write back: of everything under an empty key, of the tenant under
        ``root``."""
        out: dict[bytes, bytes] = {}
        if self.is_everything_reverted(marks.everything):
            out[b""] = self._everything_mark
        known = self._known.get(root)
        tenant, deletion = digest(marks.tenant), of_deletion(marks.tenant)
        if known is None or known.everything != self._everything or not known.deletion or tenant == known.tenant:
            return out
        if not deletion or tenant in known.past:
            out[root] = known.deletion
        return out

    def with_deletions(self) -> list[bytes]:
        """The tenants of which a deletion is known."""
        return [root for root, known in self._known.items() if known.deletion or known.gone]

    def heard_at(self, root: bytes) -> float:
        """When the last news of a tenant were, without ``root`` of everything; monotonic seconds."""
        if not root:
            return self._all_since
        known = self._known.get(root)
        return time.monotonic() if known is None else known.heard

    def acted_on(self, root: bytes, heard: float, gone: set[bytes] | None = None) -> None:
        """Notes that the news of a tenant heard then are done here, without ``root`` those of everything; with ``gone``
        they were of those chunks, else of all."""
        if not root:
            self._write_down_everything()
            return
        known = self._known.get(root)
        if known is None:
            return
        if gone is not None:
            self._set_gone(root, known, gone)
        if known.heard == heard:
            known.heard = known.unsure = 0.0
            self._write_down(root)

    def _set_gone(self, root: bytes, known: _Known, gone: set[bytes]) -> None:
        """Of a chunk that was deleted more than once the last name counts."""
        fresh = {name[: keys.HASH_BYTES] for name in gone}
        kept = {name for name in known.gone if name[: keys.HASH_BYTES] not in fresh} | gone
        if kept != known.gone:
            known.gone = kept
            self._note(GONE_PREFIX + root, b"".join(sorted(kept)))

    # ---- over restarts --------------------------------------------------------------------------------------

    def _write_down_everything(self) -> None:
        mark = self._everything_mark or _NONE
        self._note(NOTE_PREFIX, (self._everything or _NONE) + mark + b"".join(self._everything_past))

    def _write_down(self, root: bytes) -> None:
        known = self._known[root]
        if not known.heard:
            value = _NOTE.pack(known.everything, known.tenant, known.chunks, bool(known.lost))
            self._note(NOTE_PREFIX + root, value + (known.deletion or _NONE) + b"".join(known.past))

    def restore(self, name: bytes, value: bytes) -> None:
        """Takes up a note of an earlier start, when what is on disk is listed; one that cannot be read is forgotten."""
        if name.startswith(GONE_PREFIX):
            self._restore_gone(name, value)
            return
        root = name[len(NOTE_PREFIX) :]
        size = _NOTE.size if root else MARK_BYTES
        rest = [value[at : at + MARK_BYTES] for at in range(size, len(value), MARK_BYTES)]
        whole = len(value) >= size and all(len(one) == MARK_BYTES for one in rest) and len(rest) <= _MAX_PAST + 1
        if not whole or len(root) not in (0, keys.HASH_BYTES):
            self._note(name, None)
            return
        mark, past = (_read(rest[0]), tuple(rest[1:])) if rest else (b"", ())
        if not root:
            self._everything, self._everything_mark, self._everything_past = _read(value[:size]), mark, past
            return
        everything, tenant, chunks, lost = _NOTE.unpack(value[:size])
        since = time.monotonic() if lost else 0.0
        known = _Known(_read(everything), _read(tenant), _read(chunks), lost=since, deletion=mark, past=past)
        known.gone = self._known[root].gone if root in self._known else set()
        self._known[root] = known

    def _restore_gone(self, name: bytes, value: bytes) -> None:
        root, size = name[len(GONE_PREFIX) :], keys.HASH_BYTES + GONE_ID_BYTES
        if len(root) != keys.HASH_BYTES or len(value) % size:
            self._note(name, None)
            return
        known = self._known.setdefault(root, _Known(b"", b"", b""))
        known.gone = {value[at : at + size] for at in range(0, len(value), size)}

    def forget(self, root: bytes) -> None:
        """Forgets a tenant that has nothing here, unless a deletion of it is known: the engine may lose it."""
        known = self._known.get(root)
        if known is not None and not known.deletion and not known.gone:
            del self._known[root]
            self._erase(root)

    def _erase(self, root: bytes) -> None:
        self._note(NOTE_PREFIX + root, None)
        self._note(GONE_PREFIX + root, None)


def _compared(before: _Known, tenant: bytes, deletion: bool, chunks: bytes) -> News:
    if tenant and tenant != before.tenant and (deletion or before.tenant):
        return News.TENANT if deletion else News.LOST
    return News.CHUNKS if chunks and chunks != before.chunks else News.NOTHING


def _remembered(past: tuple[bytes, ...], value: bytes) -> tuple[bytes, ...]:
    if not value:
        return past
    return (*(one for one in past if one != value), value)[-_MAX_PAST:]


def _read(value: bytes) -> bytes:
    return b"" if value == _NONE else value
