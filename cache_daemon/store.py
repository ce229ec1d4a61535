"""The store: one facade over index, leases, arena and durable tier.

Four moves: ``match``, ``acquire``/``release``, ``reserve``/``commit``/``abort``, eviction. All of it runs on one
event loop; only reading the durable tier leaves it, for the ``durable-read`` executor.

Invariants:

- A slot is visible only after its checksum was verified, and does not change while anybody holds a lease.
- A chunk is in the index exactly when it can be matched; its parents are there too.
- Everything that a session holds is freed when the session ends.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import (
    EVENT_TYPE_COMMITTED,
    EVENT_TYPE_DELETED,
    EVENT_TYPE_DEMOTED,
    EVENT_TYPE_EVICTED,
    EVENT_TYPE_PERSISTED,
    RESERVE_OUTCOME_ALREADY_STORED,
    RESERVE_OUTCOME_ARENA_FULL,
    RESERVE_OUTCOME_GRANTED,
    RESERVE_OUTCOME_IN_PROGRESS,
    RESERVE_OUTCOME_PARENT_MISSING,
    EventType,
    ReserveOutcome,
    ReuseVerdict,
    StatsResponse,
)
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader, NamespaceDescriptor
from kvsidecar.errors import (
    ChecksumMismatch,
    ChunkNotFound,
    InvalidRequest,
    NamespaceMismatch,
    StaleEpoch,
    UnknownLease,
    UnknownSession,
)
from kvsidecar.layout import Geometry, layout_of

from cache_daemon.arena import ALIGNMENT, Arena, Slot
from cache_daemon.chunk import Chunk
from cache_daemon.durable import DurableTier
from cache_daemon.events import EventLog
from cache_daemon.index import PrefixIndex
from cache_daemon.policy import EvictionPolicy, LeastRecentlyUsed
from cache_daemon.session import Reservation, Session, new_lease_id
from cache_daemon.summary import SummaryWriter
from cache_daemon.writer import DurableWriter

# Evicting goes on to this share of the durable budget, so that it does not happen at every write.
_LOW_WATER = 0.95
MAX_SALT_BYTES = 256


@dataclass(frozen=True)
class Match:
    """A leased chunk and how many of its leading tokens are usable."""

    chunk: Chunk
    tokens: int
    lease_id: bytes


@dataclass(frozen=True)
class MatchResult:
    """The longest stored prefix, leased; and chunks found by content, each with its place in the prompt."""

    matches: tuple[Match, ...]
    promoted_tokens: int
    promote_ms: float = 0.0
    contents: tuple[tuple[int, Match], ...] = ()


@dataclass(frozen=True)
class Reserved:
    """What became of one reservation."""

    outcome: ReserveOutcome.ValueType
    prefix_hash: bytes
    lease_id: bytes = b""
    slot: Slot | None = None


class ChunkStore:
    """See the module. ``durable`` None keeps everything in the arena only."""

    def __init__(
        self,
        arena: Arena,
        durable: DurableTier | None,
        durable_budget_bytes: int = 0,
        new_policy: Callable[[], EvictionPolicy] = LeastRecentlyUsed,
        summary: SummaryWriter | None = None,
    ) -> None:
        self.epoch = secrets.randbits(63) + 1
        self.arena, self.summary = arena, summary
        self.events = EventLog(self.epoch)
        self._durable = durable
        self._durable_budget = durable_budget_bytes
        self._durable_bytes = 0
        self._index = PrefixIndex(summary)
        self._arena_policy, self._durable_policy = new_policy(), new_policy()
        self._sessions: dict[bytes, Session] = {}
        self._in_progress: set[bytes] = set()
        self._doomed: set[Chunk] = set()
        self._reader = ThreadPoolExecutor(1, "durable-read")
        self._writer = DurableWriter(durable, asyncio.get_running_loop()) if durable else None
        self._started = time.monotonic()
        self._counts = StatsResponse()
        self._verdicts: dict[bytes, ReuseVerdict] = {}
        if durable:
            self._load(durable)

    # ---- sessions -------------------------------------------------------------------------------------------

    def open_session(self, name: str, descriptor: NamespaceDescriptor, namespace: bytes) -> Session:
        """Begins a session. Raises NamespaceMismatch, InvalidRequest."""
        if len(name) > 64:
            raise InvalidRequest(f"client_name has {len(name)} characters; at most 64 are allowed")
        expected = keys.namespace_id(descriptor)
        if namespace != expected:
            raise NamespaceMismatch(
                f"the namespace id {namespace.hex() or '(empty)'} does not belong to the descriptor sent "
                f"(its id is {expected.hex()}); worker and daemon must be of the same version"
            )
        if descriptor.format_version != keys.FORMAT_VERSION:
            raise NamespaceMismatch(
                f"format_version is {descriptor.format_version}; this daemon stores {keys.FORMAT_VERSION}"
            )
        session = Session(name, namespace, descriptor)
        self._sessions[session.id] = session
        return session

    def open_transient(self, namespace: bytes) -> Session:
        """A session of the daemon itself, for the length of one call."""
        session = Session("daemon", namespace, NamespaceDescriptor())
        self._sessions[session.id] = session
        return session

    def close_session(self, session: Session) -> None:
        """Frees all that the session holds. Idempotent."""
        self._sessions.pop(session.id, None)
        self.release(session, list(session.leases))
        self.abort(session, list(session.reservations))

    def has_session(self, session_id: bytes) -> bool:
        """Whether such a session is open."""
        return session_id in self._sessions

    def session(self, session_id: bytes) -> Session:
        """Raises UnknownSession."""
        found = self._sessions.get(session_id)
        if found is None:
            raise UnknownSession(
                "the session has ended or never was; call Attach and use the session_id of its Welcome"
            )
        return found

    def verdict(self, namespace: bytes) -> ReuseVerdict | None:
        """What was measured of approximate reuse in a namespace."""
        if namespace not in self._verdicts and self._durable is not None:
            found = self._durable.read_note(b"verdict:" + namespace)
            if found is not None:
                self._verdicts[namespace] = ReuseVerdict.FromString(found)
        return self._verdicts.get(namespace)

    def note_skipped(self, session: Session, matches: int, tokens: int) -> None:
        """Counts lookups that a session's worker knew to be in vain. Both are totals since the session began."""
        before, session.skipped = session.skipped, (matches, tokens)
        self._counts.matches += max(0, matches - before[0])
        self._counts.requested_tokens += max(0, tokens - before[1])

    def set_verdict(self, session: Session, verdict: ReuseVerdict) -> None:
        """Keeps a verdict with the session's namespace; on disk too, where there is a durable tier."""
        self._verdicts[session.namespace] = verdict
        if self._durable is not None:
            self._durable.write_note(b"verdict:" + session.namespace, verdict.SerializeToString())

    # ---- match, acquire, release ----------------------------------------------------------------------------

    def probe(self, root: bytes, tokens: Sequence[int]) -> list[tuple[Chunk, int]]:
        """The longest stored prefix without leases."""
        return self._index.match(root, tokens)

    async def match(
        self,
        session: Session,
        tenant_salt: bytes,
        tokens: Sequence[int],
        contents: Sequence[tuple[int, int]] = (),
    ) -> MatchResult:
        """Leases the longest stored prefix of ``tokens``, bringing it into the arena where it is not, and chunks
        whose tokens are those of a stretch ``(start, tokens)`` of ``contents`` that reaches beyond the prefix.

        What cannot be brought in (corrupt, no room) ends the prefix; that is never an error.
        """
        root = keys.tenant_root(session.namespace, tenant_salt)
        found = self._index.match(root, tokens)
        result = await self._lease(session, found)
        if contents:
            try:
                elsewhere = await self._match_contents(session, root, tokens, contents, result)
            except BaseException:  # the caller went away: nobody will ever release the prefix
                self.release(session, [m.lease_id for m in result.matches])
                raise
            result = replace(result, contents=elsewhere)
        self._counts.matches += 1
        self._counts.requested_tokens += len(tokens)
        self._counts.matched_tokens += sum(m.tokens for m in result.matches)
        self._counts.promoted_tokens += result.promoted_tokens
        return result

    async def _match_contents(
        self,
        session: Session,
        root: bytes,
        tokens: Sequence[int],
        contents: Sequence[tuple[int, int]],
        prefix: MatchResult,
    ) -> tuple[tuple[int, Match], ...]:
        covered = sum(m.tokens for m in prefix.matches)
        elsewhere: list[tuple[int, Match]] = []
        for start, count in contents:
            stretch = tokens[start : start + count]
            chunk = (
                self._index.find_content(keys.content_hash(root, stretch), stretch) if start + count > covered else None
            )
            if chunk is not None:
                leased = await self._lease(session, [(chunk, count)])
                elsewhere.extend((start, m) for m in leased.matches)
        self._counts.content_tokens += sum(m.tokens for _, m in elsewhere)
        return tuple(elsewhere)

    async def match_chain(self, session: Session, tenant_salt: bytes, chain: Sequence[bytes]) -> MatchResult:
        """As ``match``, for a chain of prefix hashes: the leading ones that are stored."""
        parent = keys.tenant_root(session.namespace, tenant_salt)
        found: list[tuple[Chunk, int]] = []
        for key in chain:
            chunk = self._index.get(key)
            if chunk is None or chunk.header.parent_prefix_hash != parent:
                break
            found.append((chunk, len(chunk.header.token_ids)))
            parent = key
        return await self._lease(session, found)

    async def acquire(self, session: Session, tenant_salt: bytes, hashes: Iterable[bytes]) -> MatchResult:
        """Leases chunks by prefix hash; those that are not stored, or not this tenant's, are left out."""
        root = keys.tenant_root(session.namespace, tenant_salt)
        matches: list[Match] = []
        for key in hashes:
            chunk = self._index.get(key)
            if chunk is not None and chunk.header.root == root:
                result = await self._lease(session, [(chunk, len(chunk.header.token_ids))])
                matches.extend(result.matches)
        return MatchResult(tuple(matches), 0)

    def release(self, session: Session, lease_ids: Iterable[bytes]) -> int:
        """Gives leases back; unknown ones are ignored. Returns how many were held."""
        released = 0
        for lease_id in lease_ids:
            chunk = session.leases.pop(lease_id, None)
            if chunk is not None:
                released += 1
                self._unlease(chunk)
        return released

    async def _lease(self, session: Session, found: Sequence[tuple[Chunk, int]]) -> MatchResult:
        for chunk, _ in found:
            chunk.leases += 1
        missing = [chunk for chunk, _ in found if chunk.slot is None or chunk.loading is not None]
        began = time.perf_counter()
        try:
            if missing:
                await self._promote(missing)
        except BaseException:  # the caller went away: nobody will ever release these
            for chunk, _ in found:
                self._unlease(chunk)
            raise
        usable = 0
        while usable < len(found) and found[usable][0].slot is not None and not found[usable][0].doomed:
            usable += 1
        for chunk, _ in found[usable:]:
            self._unlease(chunk)
        if session.id not in self._sessions:
            for chunk, _ in found[:usable]:
                self._unlease(chunk)
            raise UnknownSession("the session ended while its request was served; call Attach again")
        matches = []
        for chunk, tokens in found[:usable]:
            lease_id = new_lease_id()
            session.leases[lease_id] = chunk
            chunk.hits += 1
            matches.append(Match(chunk, tokens, lease_id))
        for chunk, _ in reversed(found[:usable]):  # parents last: they outlive their children
            self._touch(chunk)
        fresh = {id(chunk) for chunk in missing}
        promoted = sum(tokens for chunk, tokens in found[:usable] if id(chunk) in fresh)
        promote_ms = (time.perf_counter() - began) * 1e3 if missing else 0.0
        return MatchResult(tuple(matches), promoted, promote_ms)

    def _unlease(self, chunk: Chunk) -> None:
        chunk.leases -= 1
        self._bury(chunk)

    async def _promote(self, chunks: Sequence[Chunk]) -> None:
        """Brings leased chunks into the arena, in order, until one fails."""
        loop = asyncio.get_running_loop()
        batch: list[tuple[Chunk, Slot]] = []
        waits: list[asyncio.Future[bool]] = []
        for chunk in chunks:
            if chunk.loading is not None:
                waits.append(chunk.loading)
                continue
            slot = self._allocate(chunk.size_bytes)
            if slot is None:
                break
            chunk.loading = loop.create_future()
            batch.append((chunk, slot))
        if batch:
            # Shielded: a caller that goes away must not leave half-loaded chunks behind.
            await asyncio.shield(asyncio.ensure_future(self._load_batch(batch)))
        if waits:
            await asyncio.wait(waits)

    async def _load_batch(self, batch: Sequence[tuple[Chunk, Slot]]) -> None:
        loop = asyncio.get_running_loop()
        outcomes = await loop.run_in_executor(self._reader, self._read_batch, batch)
        for (chunk, slot), sound in zip(batch, outcomes, strict=True):
            loading, chunk.loading = chunk.loading, None
            if sound:
                chunk.slot = slot
                self._arena_policy.touch(chunk.key, chunk.size_bytes, chunk.header.prefill_seconds)
            else:
                self.arena.free(slot)
                if not chunk.doomed:
                    self._counts.corrupt_chunks += 1
                    self._drop(chunk, EVENT_TYPE_DELETED)
            assert loading is not None
            loading.set_result(sound)
            self._bury(chunk)

    def _read_batch(self, batch: Sequence[tuple[Chunk, Slot]]) -> list[bool]:
        """Runs on the reader's thread; touches nothing but the slots."""
        assert self._durable is not None
        outcomes = []
        for chunk, slot in batch:
            with self.arena.writing(slot) as view:
                sound = self._durable.read_into(chunk.key, view) and keys.checksum(view) == chunk.header.checksum
            outcomes.append(sound)
        return outcomes

    # ---- reserve, commit, abort -----------------------------------------------------------------------------

    def reserve(self, session: Session, tenant_salt: bytes, headers: Sequence[ChunkHeader]) -> list[Reserved]:
        """Takes slots for new chunks, parents before children. Raises InvalidRequest for a malformed header."""
        root = keys.tenant_root(session.namespace, tenant_salt)
        expected = Geometry.of(session.descriptor)
        for header in headers:
            self._check_header(header, expected)
        return [self._reserve_one(session, root, header) for header in headers]

    @staticmethod
    def _check_header(header: ChunkHeader, expected: Geometry) -> None:
        geometry = Geometry.of(header)
        if geometry != expected:
            raise InvalidRequest(f"the chunk's geometry is {geometry}, the session's namespace has {expected}")
        size = layout_of(header).size_bytes
        if size != header.payload_bytes:
            raise InvalidRequest(f"payload_bytes is {header.payload_bytes}; the header's layout has {size}")

    def _reserve_one(self, session: Session, root: bytes, header: ChunkHeader) -> Reserved:
        parent = header.parent_prefix_hash or root
        key = keys.prefix_hash(parent, header.token_ids)
        if self._index.get(key) is not None:
            return Reserved(RESERVE_OUTCOME_ALREADY_STORED, key)
        if key in self._in_progress:
            return Reserved(RESERVE_OUTCOME_IN_PROGRESS, key)
        if not self._parent_known(session, root, parent, header.start_position):
            return Reserved(RESERVE_OUTCOME_PARENT_MISSING, key)
        slot = self._allocate(header.payload_bytes)
        if slot is None:
            return Reserved(RESERVE_OUTCOME_ARENA_FULL, key)
        stored = ChunkHeader()
        stored.CopyFrom(header)
        stored.root, stored.parent_prefix_hash, stored.prefix_hash = root, parent, key
        stored.content_hash = keys.content_hash(root, header.token_ids)
        lease_id = new_lease_id()
        session.reservations[lease_id] = Reservation(stored, slot)
        self._in_progress.add(key)
        return Reserved(RESERVE_OUTCOME_GRANTED, key, lease_id, slot)

    def _parent_known(self, session: Session, root: bytes, parent: bytes, start: int) -> bool:
        """The parent is the root, stored, or being written by this session, and ends where the chunk begins."""
        if parent == root:
            return start == 0
        chunk = self._index.get(parent)
        header = chunk.header if chunk else None
        if header is None and parent in self._in_progress:
            mine = (r.header for r in session.reservations.values())
            header = next((h for h in mine if h.prefix_hash == parent), None)
        return header is not None and header.root == root and header.start_position + len(header.token_ids) == start

    def commit(self, session: Session, items: Sequence[tuple[bytes, int, int]]) -> int:
        """Makes reserved chunks visible. ``items`` are ``(lease id, checksum, epoch)``; returns how many.

        All items are checked before any becomes visible. Raises StaleEpoch, UnknownLease, ChecksumMismatch; the
        chunk that failed is freed, the others stay reserved.
        """
        for lease_id, checksum, epoch in items:
            if epoch != self.epoch:
                raise StaleEpoch(f"the slot is of epoch {epoch}, the daemon's is {self.epoch}; attach again")
            reservation = session.reservations.get(lease_id)
            if reservation is None:
                raise UnknownLease("the lease is not a reservation of this session; reserve the chunk again")
            found = keys.checksum(self.arena.read(reservation.slot))
            if found != checksum:
                self.abort(session, [lease_id])
                raise ChecksumMismatch(
                    f"the slot's XXH3-64 is {found:016x}, the commit says {checksum:016x}; the chunk was discarded"
                )
        committed = 0
        for lease_id, checksum, _ in items:
            reservation = session.reservations.pop(lease_id)
            self._in_progress.discard(reservation.header.prefix_hash)
            reservation.header.checksum = checksum
            committed += self._make_visible(reservation)
        return committed

    def _make_visible(self, reservation: Reservation) -> bool:
        header = reservation.header
        parent = header.parent_prefix_hash
        if parent != header.root and self._index.get(parent) is None:  # evicted meanwhile
            self.arena.free(reservation.slot)
            return False
        chunk = Chunk(header, reservation.slot)
        self._index.add(chunk)
        for old in self._index.superseded_by(chunk):
            # Its pin goes on: the new chunk holds the same prefix.
            chunk.pins += old.pins
            self._drop(old, EVENT_TYPE_DELETED)
        for known in reversed(self._index.path(chunk)):
            self._touch(known)
        self._counts.commits += 1
        self.events.append(EVENT_TYPE_COMMITTED, chunk)
        self._persist(chunk)
        return True

    def abort(self, session: Session, lease_ids: Iterable[bytes]) -> int:
        """Frees reserved slots; unknown leases are ignored."""
        aborted = 0
        for lease_id in lease_ids:
            reservation = session.reservations.pop(lease_id, None)
            if reservation is not None:
                self._in_progress.discard(reservation.header.prefix_hash)
                self.arena.free(reservation.slot)
                aborted += 1
        return aborted

    # ---- durability -----------------------------------------------------------------------------------------

    def _load(self, durable: DurableTier) -> None:
        orphans = []
        for header in durable.load():
            parent = header.parent_prefix_hash
            if parent != header.root and self._index.get(parent) is None:
                orphans.append(header.prefix_hash)
                continue
            self._index.add(Chunk(header, durable=True))
            self._durable_bytes += header.payload_bytes
            self._durable_policy.touch(header.prefix_hash, header.payload_bytes, header.prefill_seconds)
        assert self._writer is not None
        for key in orphans:
            self._writer.remove(key)

    def _persist(self, chunk: Chunk) -> None:
        if self._writer is None or chunk.slot is None or not self._make_durable_room(chunk.size_bytes):
            return
        chunk.writing = True
        self._durable_bytes += chunk.size_bytes
        slot = chunk.slot
        self._writer.put(chunk.header, lambda: self.arena.read(slot), lambda written: self._persisted(chunk, written))

    def _persisted(self, chunk: Chunk, written: bool) -> None:
        chunk.writing = False
        if chunk.doomed:
            self._durable_bytes -= chunk.size_bytes
        elif written:
            chunk.durable = True
            self._durable_policy.touch(chunk.key, chunk.size_bytes, chunk.header.prefill_seconds)
            self.events.append(EVENT_TYPE_PERSISTED, chunk)
        else:
            self._durable_bytes -= chunk.size_bytes
            self._counts.failed_writes += 1
        self._bury(chunk)

    def _make_durable_room(self, size_bytes: int) -> bool:
        if self._durable_bytes + size_bytes <= self._durable_budget:
            return True
        target = self._durable_budget * _LOW_WATER - size_bytes
        while self._durable_bytes > target:
            victim = self._victim(self._durable_policy, lambda c: c.durable and not c.in_use)
            if victim is None:
                break
            self._counts.durable_evictions += 1
            self._drop(victim, EVENT_TYPE_EVICTED)
        return self._durable_bytes + size_bytes <= self._durable_budget

    # ---- room in the arena ----------------------------------------------------------------------------------

    def _allocate(self, size_bytes: int) -> Slot | None:
        """A slot, evicting as long as it helps."""
        while (slot := self.arena.allocate(size_bytes)) is None:
            demotable = self._victim(
                self._arena_policy, lambda c: c.slot is not None and not c.in_use, lambda c: c.durable
            )
            if demotable is None:
                return None
            self._counts.arena_evictions += 1
            if demotable.durable:
                self._free_slot(demotable)
                self.events.append(EVENT_TYPE_DEMOTED, demotable)
            else:
                self._drop(demotable, EVENT_TYPE_EVICTED)
        return slot

    def _victim(
        self,
        policy: EvictionPolicy,
        allowed: Callable[[Chunk], bool],
        survives: Callable[[Chunk], bool] = lambda _: False,
    ) -> Chunk | None:
        """The first chunk that may go: unpinned and, unless it survives in another tier, without children."""
        for key in policy.victims():
            chunk = self._index.get(key)
            if chunk is None or chunk.pins or not allowed(chunk):
                continue
            if survives(chunk) or not self._index.has_children(chunk):
                return chunk
        return None

    def _touch(self, chunk: Chunk) -> None:
        weight = chunk.size_bytes, chunk.header.prefill_seconds
        if chunk.slot is not None:
            self._arena_policy.touch(chunk.key, *weight)
        if chunk.durable:
            self._durable_policy.touch(chunk.key, *weight)

    # ---- removal --------------------------------------------------------------------------------------------

    def pin(self, root: bytes, prefix_hash: bytes, count: int) -> int:
        """Adds ``count`` (1 or -1) to the pins of a prefix. Returns its chunks. Raises ChunkNotFound."""
        path = self._index.path(self._known(root, prefix_hash))
        for chunk in path:
            chunk.pins = max(0, chunk.pins + count)
        return len(path)

    def delete(self, namespace: bytes, tenant_salt: bytes, prefix_hash: bytes) -> int:
        """Removes a chunk with all that continues it, a tenant, or everything. Raises ChunkNotFound."""
        if not namespace:
            victims = list(self._index)
        elif not prefix_hash:
            root = keys.tenant_root(namespace, tenant_salt)
            victims = [c for c in self._index if c.header.root == root]
        else:
            victims = self._index.subtree(self._known(keys.tenant_root(namespace, tenant_salt), prefix_hash))
        for chunk in victims:
            self._discard(chunk, EVENT_TYPE_DELETED)
        return len(victims)

    def find(self, root: bytes, prefix_hash: bytes) -> Chunk:
        """Raises ChunkNotFound."""
        return self._known(root, prefix_hash)

    def list_chunks(self, root: bytes, after: bytes, limit: int) -> list[Chunk]:
        """Chunks ordered by prefix hash."""
        wanted = sorted(c.key for c in self._index if c.key > after and (not root or c.header.root == root))[:limit]
        return [c for key in wanted if (c := self._index.get(key)) is not None]

    def _known(self, root: bytes, prefix_hash: bytes) -> Chunk:
        chunk = self._index.get(prefix_hash)
        if chunk is None or chunk.header.root != root:
            raise ChunkNotFound(f"no chunk {prefix_hash.hex() or '(empty)'} is stored in this namespace and tenant")
        return chunk

    def _drop(self, chunk: Chunk, why: EventType.ValueType) -> None:
        """Removes a chunk and all that continues it."""
        for member in reversed(self._index.subtree(chunk)):
            self._discard(member, why)

    def _discard(self, chunk: Chunk, why: EventType.ValueType) -> None:
        self._index.remove(chunk)
        self._arena_policy.forget(chunk.key)
        self._durable_policy.forget(chunk.key)
        if chunk.durable:
            self._durable_bytes -= chunk.size_bytes
        if self._writer is not None and (chunk.durable or chunk.writing):
            self._writer.remove(chunk.key)
        chunk.durable = False
        chunk.doomed = True
        self._doomed.add(chunk)
        self.events.append(why, chunk)
        self._bury(chunk)

    def _bury(self, chunk: Chunk) -> None:
        """Frees the slot of a doomed chunk once nobody uses it."""
        if chunk.doomed and not chunk.in_use:
            self._free_slot(chunk)
            self._doomed.discard(chunk)

    def _free_slot(self, chunk: Chunk) -> None:
        if chunk.slot is not None:
            self.arena.free(chunk.slot)
            chunk.slot = None
            self._arena_policy.forget(chunk.key)

    # ---- state ----------------------------------------------------------------------------------------------

    def stats(self) -> StatsResponse:
        out = StatsResponse()
        out.CopyFrom(self._counts)
        out.epoch = self.epoch
        out.uptime_seconds = time.monotonic() - self._started
        out.sessions = len(self._sessions)
        out.chunks, out.tokens = len(self._index), self._index.tokens
        out.arena_bytes, out.arena_used_bytes = self.arena.size_bytes, self.arena.used_bytes
        out.durable_budget_bytes, out.durable_bytes = self._durable_budget, self._durable_bytes
        out.leases = sum(len(s.leases) for s in self._sessions.values())
        out.reservations = sum(len(s.reservations) for s in self._sessions.values())
        out.pending_writes = self._writer.pending if self._writer else 0
        return out

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot and lease is accounted for exactly once."""
        self.arena.check_integrity()
        self._index.check_integrity()
        slots = [c.slot for c in [*self._index, *self._doomed] if c.slot is not None]
        slots += [r.slot for s in self._sessions.values() for r in s.reservations.values()]
        pages = sum(-(-s.size_bytes // ALIGNMENT) * ALIGNMENT for s in slots)
        loading = [c for c in [*self._index, *self._doomed] if c.loading is not None]
        assert loading or pages == self.arena.used_bytes, f"slots hold {pages} bytes, the arena {self.arena.used_bytes}"
        held: dict[int, int] = {}
        for session in self._sessions.values():
            for chunk in session.leases.values():
                held[id(chunk)] = held.get(id(chunk), 0) + 1
        for chunk in [*self._index, *self._doomed]:
            assert chunk.leases >= held.get(id(chunk), 0), "a lease is not counted"

    def close(self) -> None:
        """Writes what is queued and closes the tiers. Blocks."""
        if self._writer is not None:
            self._writer.stop()
        self._reader.shutdown()
        if self._durable is not None:
            self._durable.close()
        self.arena.close()
