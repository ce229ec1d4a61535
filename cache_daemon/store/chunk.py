"""One stored chunk and its state in each tier."""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from kvsidecar import keys
from kvsidecar.cache.v1.cache_pb2 import ChunkInfo, ChunkMatch, MatchResponse
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader

from cache_daemon.memory.arena import Slot
from cache_daemon.store.tenant_accounts import TenantAccount


class Residency(enum.Enum):
    """State of a chunk's payload in one tier."""

    ABSENT = enum.auto()
    IN_FLIGHT = enum.auto()  # being read from the tier, or written to it: the slot must not be freed
    PRESENT = enum.auto()


class ChunkSnapshot(NamedTuple):
    """A chunk's state at one time, cheaper to make than its protobuf message."""

    header: ChunkHeader
    ids: bytes  # as ``Chunk.ids``
    resident: bool
    durable: bool
    pinned: bool
    leases: int
    hits: int
    stored_bytes: int
    idle_seconds: float
    ttl_left_seconds: float  # until the TTL that requests have set ends

    def info(self, *, with_tokens: bool = False) -> ChunkInfo:
        """Build the message of ``List`` and ``Watch``."""
        h = self.header
        return ChunkInfo(
            root=h.root,
            prefix_hash=h.prefix_hash,
            parent_prefix_hash=h.parent_prefix_hash,
            start_position=h.start_position,
            tokens=h.token_count,
            bits=h.bits,
            payload_bytes=h.payload_bytes,
            resident=self.resident,
            durable=self.durable,
            pinned=self.pinned,
            leases=self.leases,
            hits=self.hits,
            stored_bytes=self.stored_bytes,
            idle_seconds=self.idle_seconds,
            ttl_seconds=None if self.ttl_left_seconds == inf else self.ttl_left_seconds,
            token_ids=memoryview(self.ids).cast("I").tolist() if with_tokens else None,
        )


@dataclass(eq=False, slots=True)
class WriteState:
    """State of a chunk's write to the durable tier, owned by Persistence."""

    maybe_on_disk: bool = False  # a failed write may have reached the disk
    superseder_count: int = 0  # longer siblings that replace it once they are durable
    supersedes: list[Chunk] = field(default_factory=list, repr=False)


@dataclass(eq=False, slots=True)
class Chunk:
    """A committed chunk: in the arena, in the durable tier, or in both.

    ``indexed`` is True while the index contains it. Users of its slot (leases, the writer, the reader) keep the slot
    even after the chunk has left the index.

    Each mutable field has one writer: TierManager (``slot``, the two states, ``indexed``, ``stored_bytes``, ``hits``,
    ``last_used_at``, ``touched_at``, ``load_future``, ``low_priority``), LeaseGuard (``leases``), Pins (``pins``),
    RetainedChunks (``retained_until``, ``is_retained``), Insertion (``anchors``), TtlIndex (``expires_at``),
    ChunkGroups (``group``), GpuTier (``gpu_slot``, ``gpu_state``) and Persistence (``write_state``).
    """

    header: ChunkHeader  # without its token_ids: those are ``ids``
    ids: bytes  # token ids as uint32 little-endian
    tenant: TenantAccount
    slot: Slot | None = None
    arena_state: Residency = Residency.ABSENT
    disk_state: Residency = Residency.ABSENT
    gpu_slot: Slot | None = None  # in the GPU arena
    gpu_state: Residency = Residency.ABSENT
    indexed: bool = True
    leases: int = 0
    pins: int = 0
    is_retained: bool = False
    anchors: int = 0  # number of running insertions of its children; see Insertion
    hits: int = 0
    last_used_at: float = 0.0  # seconds, on the store's clock
    expires_at: float = inf  # end of the TTL that requests set, on the store's clock; see TtlIndex
    retained_until: float = 0.0  # requested end of the retention, on the store's clock; see RetainedChunks
    group: str = ""  # see ChunkGroups
    low_priority: bool = False  # see TierQuotas
    stored_bytes: int = 0  # in the durable tier
    write_state: WriteState = field(default_factory=WriteState, repr=False)
    load_future: asyncio.Future[None] | None = field(default=None, repr=False)  # set while arena_state is IN_FLIGHT
    inserted_at: float = field(default_factory=lambda: time.monotonic(), init=False)
    touched_at: float = field(init=False)  # last use or insertion that the eviction policies know, as last_used_at
    # Copy of the header's field: Match reads it for every chunk that it finds.
    key: bytes = field(init=False)
    parent_key: bytes = field(init=False)
    size_bytes: int = field(init=False)
    tokens: int = field(init=False)
    _encoded_match: tuple[Slot, Slot | None, bytes] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.key, self.parent_key = self.header.prefix_hash, self.header.parent_prefix_hash
        self.touched_at = self.last_used_at
        self.size_bytes = self.header.payload_bytes
        self.tokens = len(self.ids) // keys.TOKEN_BYTES

    @property
    def root(self) -> bytes:
        return self.header.root

    @property
    def is_first(self) -> bool:
        """Return True for the first chunk of a prompt."""
        return self.parent_key == self.header.root

    @property
    def start_position(self) -> int:
        return self.header.start_position

    @property
    def end_position(self) -> int:
        return self.header.start_position + self.tokens

    @property
    def prefill_seconds(self) -> float:
        return self.header.prefill_seconds

    @property
    def is_spared(self) -> bool:
        """True if eviction must not remove the chunk."""
        return self.pins > 0 or self.is_retained

    @property
    def deadline(self) -> float:
        """Time at which the TTL of requests or of the tenant ends, on the store's clock; a use may postpone it."""
        ttl = self.tenant.limits.ttl_seconds
        return self.expires_at if ttl is None else min(self.expires_at, self.last_used_at + ttl)

    def is_expired(self, now: float) -> bool:
        """Return True if the deadline has passed. A pinned chunk never expires."""
        return not self.pins and self.deadline < now

    @property
    def in_use(self) -> bool:
        """Return True while a slot is leased, read or written."""
        return self.leases > 0 or Residency.IN_FLIGHT in (self.arena_state, self.disk_state, self.gpu_state)

    @property
    def is_readable(self) -> bool:
        """True if the chunk is indexed and in the arena."""
        return self.arena_state is Residency.PRESENT and self.indexed

    @property
    def readable_gpu_slot(self) -> Slot | None:
        """The slot in the GPU arena that contains the payload; None if there is none."""
        return self.gpu_slot if self.gpu_state is Residency.PRESENT else None

    def to_match(self, tokens: int, with_offsets: bool) -> ChunkMatch:
        """Build the ``Match`` entry for ``tokens`` matched leading tokens.

        A caller that maps no memory gets no offsets.
        """
        header = self.header
        slot, gpu_slot = (self.slot, self.readable_gpu_slot) if with_offsets else (None, None)
        return ChunkMatch(
            prefix_hash=self.key,
            start_position=header.start_position,
            tokens=self.tokens,
            matched_tokens=tokens,
            key_group_tokens=header.key_group_tokens,
            sink_tokens=header.sink_tokens,
            offset=slot.offset if slot is not None else 0,
            payload_bytes=self.size_bytes,
            gpu_offset=gpu_slot.offset if gpu_slot is not None else None,
        )

    def encoded_match(self) -> bytes:
        """Encode a MatchResponse that contains the whole chunk in its slots.

        Concatenating the encodings of several chunks gives one response with all of them, because protobuf merges
        repeated fields. Cached until the chunk moves.
        """
        assert self.slot is not None, "a leased chunk has a slot"
        known, copy = self._encoded_match, self.readable_gpu_slot
        if known is None or known[0] is not self.slot or known[1] is not copy:
            told = MatchResponse(matches=[self.to_match(self.tokens, with_offsets=True)])
            known = self._encoded_match = self.slot, copy, told.SerializeToString()
        return known[2]

    def full_header(self) -> ChunkHeader:
        """Copy the header, with its token ids."""
        header = ChunkHeader()
        header.CopyFrom(self.header)
        header.token_ids.extend(memoryview(self.ids).cast("I").tolist())
        return header

    def snapshot(self, now: float) -> ChunkSnapshot:
        """Capture the state for events and ``List``."""
        return ChunkSnapshot(
            self.header,
            self.ids,
            self.arena_state is Residency.PRESENT,
            self.disk_state is Residency.PRESENT,
            self.pins > 0,
            self.leases,
            self.hits,
            self.stored_bytes,
            max(0.0, now - self.last_used_at),
            max(0.0, self.expires_at - now),
        )

    def info(self, now: float, *, with_tokens: bool = False) -> ChunkInfo:
        return self.snapshot(now).info(with_tokens=with_tokens)
