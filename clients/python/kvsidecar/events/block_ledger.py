"""Converts changes of stored chunks to block events.

Chunks have any length, but routers count blocks of one length. A block belongs to the chunk in which it ends; the
daemon has that chunk only with all its ancestors. Chunks with a common prefix share blocks, so blocks are
reference-counted: a block is removed when the last chunk with it is removed. Each tier has its own reference counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvsidecar.cache.v1.cache_pb2 import EVENT_TYPE_DELETED, EVENT_TYPE_EVICTED, ChunkInfo, EventType
from kvsidecar.events.block_hashes import block_hash, external_hash, seed_hash
from kvsidecar.events.vllm_events import BlockRemoved, BlockStored, Event

ARENA, DISK = "CPU", "STORAGE"
"""vLLM's medium names for the tiers."""


@dataclass(frozen=True)
class _ChunkEnd:
    """A chunk's end: the hash of the last complete block, and the tokens after it."""

    block: bytes
    rest: tuple[int, ...]
    first: bool  # there is no complete block yet


@dataclass
class _LedgerChunk:
    """A chunk: its end, the hashes of the blocks that end in it, and its tiers."""

    end: _ChunkEnd
    blocks: tuple[int, ...]
    media: frozenset[str] = frozenset()


@dataclass
class BlockLedger:
    """Blocks of one tenant in a namespace; ``salt`` is the tenant's. For one thread."""

    block_tokens: int
    salt: bytes
    seed: str
    _chunks: dict[bytes, _LedgerChunk] = field(default_factory=dict)
    _holders: Counter[tuple[str, int]] = field(default_factory=Counter)  # reference counts of blocks by medium

    def change(self, kind: EventType.ValueType, chunk: ChunkInfo) -> list[Event]:
        """Apply a Watch event, whose chunk has its tokens; return the block events.

        Ignores a chunk whose parent is unknown: the parent was removed, and the chunk's own removal follows.
        """
        gone = kind in (EVENT_TYPE_DELETED, EVENT_TYPE_EVICTED)
        return self._move(chunk, frozenset() if gone else _media(chunk))

    def replace(self, chunks: Iterable[ChunkInfo]) -> list[Event]:
        """Apply a full list of stored chunks; return the block events for the differences."""
        listed = sorted(chunks, key=lambda chunk: chunk.start_position)  # parents first
        now = {chunk.prefix_hash for chunk in listed}
        out: list[Event] = []
        for key in [key for key in self._chunks if key not in now]:
            out += self._leave(self._chunks.pop(key), frozenset())
        for chunk in listed:
            out += self._move(chunk, _media(chunk))
        return out

    def reset(self) -> None:
        """Drop all state: every block is published again."""
        self._chunks.clear()
        self._holders.clear()

    def _move(self, chunk: ChunkInfo, media: frozenset[str]) -> list[Event]:
        """Set the media of a chunk; return the block events."""
        held = self._chunks.get(chunk.prefix_hash)
        if held is None and not media:
            return []
        before = self._before(chunk)
        if held is None:
            if before is None:
                return []
            held = self._chunks[chunk.prefix_hash] = self._placed(before, chunk.token_ids)
        out = self._leave(held, media)
        if not media:
            del self._chunks[chunk.prefix_hash]
        elif before is not None:
            for medium in sorted(media - held.media):
                out += self._enter(held, before, chunk.token_ids, medium)
            held.media = media
        return out

    def _before(self, chunk: ChunkInfo) -> _ChunkEnd | None:
        """Return the ``_ChunkEnd`` of a chunk's parent; None when the parent is unknown."""
        if not chunk.start_position:
            return _ChunkEnd(seed_hash(self.seed), (), True)
        parent = self._chunks.get(chunk.parent_prefix_hash)
        return None if parent is None else parent.end

    def _placed(self, before: _ChunkEnd, tokens: Sequence[int]) -> _LedgerChunk:
        ids, last, names = (*before.rest, *tokens), before.block, list[int]()
        first, whole = before.first, len(ids) // self.block_tokens * self.block_tokens
        for at in range(0, whole, self.block_tokens):
            last = block_hash(last, ids[at : at + self.block_tokens], self._named_salt if first else b"")
            first = False
            names.append(external_hash(last))
        return _LedgerChunk(_ChunkEnd(last, ids[whole:], first), tuple(names))

    def _enter(self, held: _LedgerChunk, before: _ChunkEnd, tokens: Sequence[int], medium: str) -> list[Event]:
        """Add references of a chunk's blocks in a medium.

        Returns one event per contiguous run of new blocks.
        """
        ids, out, run = (*before.rest, *tokens), list[Event](), list[int]()
        for i, name in enumerate(held.blocks):
            self._holders[medium, name] += 1
            if self._holders[medium, name] == 1:
                run.append(i)
            if run and (run[-1] < i or i == len(held.blocks) - 1):
                out.append(self._stored(held, before, ids[: len(held.blocks) * self.block_tokens], run, medium))
                run = []
        return out

    def _stored(
        self, held: _LedgerChunk, before: _ChunkEnd, ids: tuple[int, ...], run: list[int], medium: str
    ) -> BlockStored:
        first, last = run[0], run[-1]
        parent = held.blocks[first - 1] if first else None if before.first else external_hash(before.block)
        salted = self._named_salt and before.first and not first
        return BlockStored(
            block_hashes=list(held.blocks[first : last + 1]),
            parent_block_hash=parent,
            token_ids=list(ids[first * self.block_tokens : (last + 1) * self.block_tokens]),
            block_size=self.block_tokens,
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=[(self._named_salt,), *[None] * (last - first)] if salted else None,
        )

    def _leave(self, held: _LedgerChunk, media: frozenset[str]) -> list[Event]:
        """Remove a chunk from all media but these; return the block events."""
        out: list[Event] = []
        for medium in sorted(held.media - media):
            gone = []
            for name in held.blocks:
                self._holders[medium, name] -= 1
                if not self._holders[medium, name]:
                    del self._holders[medium, name]
                    gone.append(name)
            if gone:
                out.append(BlockRemoved(block_hashes=gone, medium=medium))
        held.media &= media
        return out

    @property
    def _named_salt(self) -> str | bytes:
        """Salt in vLLM's form, which is text. Salts that are not UTF-8 belong to other clients."""
        try:
            return self.salt.decode()
        except UnicodeDecodeError:
            return self.salt


def _media(chunk: ChunkInfo) -> frozenset[str]:
    return frozenset(name for name, there in ((ARENA, chunk.resident), (DISK, chunk.durable)) if there)
