"""What this node knows of deletions in a remote engine: the marks that it saw last, kept over its restarts.

No clock of another node plays a part: what was listed here before another mark was seen is from before, whenever that
was.
"""

from __future__ import annotations

import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from kvsidecar import keys

from cache_daemon.remote.entries import MARK_BYTES
from cache_daemon.remote.marks import Marks, digest, of_deletion
from cache_daemon.store.chunk import Chunk

NOTE_PREFIX = b"remote-mark:"
_NOTE = struct.Struct(f"<{MARK_BYTES}s{MARK_BYTES}s{MARK_BYTES}s?")
_NONE = bytes(MARK_BYTES)
_MOST = 100_000


class News(Enum):
    """What marks say that are others than before."""

    NOTHING = auto()
    LOST = auto()  # the engine has lost them, and may have lost deletions: what is here is not written there any more
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
    lost: bool = False  # the same holds after a restart for all that is on disk by then
    unsure: float = 0.0  # up to when it may be among the chunks that were deleted
    heard: float = 0.0  # when there was news that have not been acted on; 0: no such
    gone: set[bytes] = field(default_factory=set)  # of deleted chunks what was acted on


class TenantMarks:
    """``note`` keeps a small value for the next start; None deletes it. What there is news of is written down when that
    was acted on, or a sudden end would leave what was deleted."""

    def __init__(self, note: Callable[[bytes, bytes | None], None]) -> None:
        self._note = note
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._everything: bytes | None = None  # its digest; None: never seen
        self._all_since = 0.0
        self._unknown_since = 0.0  # for tenants that are not remembered any more

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._known))

    def is_old(self, chunk: Chunk) -> bool:
        """Whether a chunk was listed here before the last deletion elsewhere that may concern it."""
        known = self._known.get(chunk.root)
        of_tenant = self._unknown_since if known is None else max(known.since, known.unsure)
        return chunk.made_at <= max(of_tenant, self._all_since)

    def seen(self, root: bytes, marks: Marks) -> News:
        """Hears what the engine has now. Returns what has happened since the last time."""
        now = time.monotonic()
        everything = self._seen_everything(digest(marks.everything), now)
        tenant, chunks = digest(marks.tenant), digest(marks.chunks)
        before = self._known.get(root)
        if before is None or before.everything != self._everything:
            # Where everything was deleted, that is all there is to do.
            news = News.CHUNKS if chunks and everything is News.NOTHING else News.NOTHING
            after = _Known(self._everything or b"", tenant, chunks, since=self._unknown_since)
        else:
            news = _compared(before, tenant, of_deletion(marks.tenant), chunks)
            same = news is News.NOTHING and (before.tenant or not tenant)
            if same:
                self._known.move_to_end(root)
                return everything
            after = _Known(before.everything, tenant or before.tenant, chunks or before.chunks, before.since,
                           before.lost, before.unsure, before.heard, before.gone)  # fmt: skip
        if news is News.CHUNKS:
            after.unsure = after.heard = now
        elif news in (News.LOST, News.TENANT):
            after.since, after.lost = now, news is News.LOST
            after.heard = now if news is News.TENANT else after.heard
            after.chunks = (
                before.chunks if before is not None and news is News.LOST else after.chunks
            )  # heard next time
        self._remember(root, after)
        return everything if everything is not News.NOTHING else news

    def _seen_everything(self, value: bytes, now: float) -> News:
        if value == self._everything or (not value and self._everything is not None):
            return News.NOTHING
        first = self._everything is None
        self._everything = value
        if first:
            self._write_down_everything()
            return News.NOTHING
        self._all_since = now
        return News.EVERYTHING

    def _remember(self, root: bytes, known: _Known) -> None:
        self._known[root] = known
        self._known.move_to_end(root)
        self._write_down(root)
        if len(self._known) > _MOST:
            oldest, gone = self._known.popitem(last=False)
            self._unknown_since = max(self._unknown_since, gone.since, gone.unsure)
            self._note(NOTE_PREFIX + oldest, None)

    # ---- deletions ------------------------------------------------------------------------------------------

    def made_here(self, root: bytes, mark: bytes) -> None:
        """This node has deleted a tenant, without ``root`` everything, which has the mark now."""
        now = time.monotonic()
        if root:
            self._remember(root, _Known(self._everything or b"", digest(mark), b"", since=now))
        else:
            self._everything, self._all_since = digest(mark), now
            self._write_down_everything()

    def left_here(self, root: bytes, gone: set[bytes]) -> None:
        """This node has deleted chunks of a tenant: that need not be acted on."""
        known = self._known.get(root)
        if known is not None:
            known.gone |= gone

    def news_of(self, root: bytes, gone: set[bytes]) -> set[bytes]:
        """What of a tenant's deleted chunks was not acted on yet."""
        known = self._known.get(root)
        return gone if known is None else gone - known.gone

    def heard_at(self, root: bytes) -> float:
        """When the last news of a tenant were, without ``root`` of everything; monotonic seconds."""
        if not root:
            return self._all_since
        known = self._known.get(root)
        return time.monotonic() if known is None else known.heard

    def acted_on(self, root: bytes, heard: float, gone: set[bytes] | None = None) -> None:
        """What was heard then of a tenant is done here, without ``root`` of everything; with ``gone`` it was of those
        chunks, else of all."""
        if not root:
            self._write_down_everything()
            return
        known = self._known.get(root)
        if known is None:
            return
        if gone is not None:
            known.gone = gone
        if known.heard == heard:
            known.heard = known.unsure = 0.0
            self._write_down(root)

    def _write_down_everything(self) -> None:
        self._note(NOTE_PREFIX, self._everything or _NONE)

    # ---- over restarts --------------------------------------------------------------------------------------

    def _write_down(self, root: bytes) -> None:
        known = self._known[root]
        if not known.heard:
            value = _NOTE.pack(known.everything, known.tenant, known.chunks, known.lost)
            self._note(NOTE_PREFIX + root, value)

    def restore(self, name: bytes, value: bytes) -> None:
        """Takes up a note of an earlier start, when what is on disk is listed; one that cannot be read is forgotten."""
        root = name[len(NOTE_PREFIX) :]
        if not root and len(value) == MARK_BYTES:
            self._everything = _read(value)
        elif len(root) == keys.HASH_BYTES and len(value) == _NOTE.size:
            everything, tenant, chunks, lost = _NOTE.unpack(value)
            since = time.monotonic() if lost else 0.0
            self._known[root] = _Known(_read(everything), _read(tenant), _read(chunks), since, lost)
        else:
            self._note(name, None)

    def forget(self, root: bytes) -> None:
        """Nothing of a tenant is here."""
        self._known.pop(root, None)
        self._note(NOTE_PREFIX + root, None)


def _compared(before: _Known, tenant: bytes, deletion: bool, chunks: bytes) -> News:
    if tenant and tenant != before.tenant and (deletion or before.tenant):
        return News.TENANT if deletion else News.LOST
    return News.CHUNKS if chunks and chunks != before.chunks else News.NOTHING


def _read(value: bytes) -> bytes:
    return b"" if value == _NONE else value
