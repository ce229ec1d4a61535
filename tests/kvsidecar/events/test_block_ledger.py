"""Blocks out of chunks: whatever order chunks come, move and go in, a router knows what is stored."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.events.block_hashes import DEFAULT_SEED, block_hash, external_hash, seed_hash
from kvsidecar.events.block_ledger import ARENA, DISK, BlockLedger

from tests.kvsidecar.events.router import Router

BLOCK_TOKENS = 3
KEPT, GONE = pb.EVENT_TYPE_COMMITTED, pb.EVENT_TYPE_EVICTED


@dataclass
class Stored:
    """Stored chunks by name. Each has the name of its parent, and the tokens of the prompt up to its end."""

    chunks: dict[bytes, pb.ChunkInfo] = field(default_factory=dict)
    prompts: dict[bytes, list[int]] = field(default_factory=lambda: {b"root": []})

    def add(self, parent: bytes, tokens: list[int], name: bytes) -> pb.ChunkInfo:
        start = len(self.prompts[parent])
        self.prompts[name] = [*self.prompts[parent], *tokens]
        self.chunks[name] = pb.ChunkInfo(
            prefix_hash=name, parent_prefix_hash=parent, start_position=start, tokens=len(tokens), token_ids=tokens,
            resident=True,
        )  # fmt: skip
        return self.chunks[name]

    def is_parent(self, name: bytes) -> bool:
        return any(chunk.parent_prefix_hash == name for chunk in self.chunks.values())

    def blocks(self, salt: str = "") -> set[tuple[str | None, int]]:
        """Compute from scratch the blocks that end in each chunk, with the chunk's tier."""
        out = set()
        for name, chunk in self.chunks.items():
            ids, last = self.prompts[name], seed_hash()
            for at in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
                last = block_hash(last, ids[at : at + BLOCK_TOKENS], "" if at else salt)
                if at + BLOCK_TOKENS > chunk.start_position:
                    media = ((ARENA, chunk.resident), (DISK, chunk.durable))
                    out |= {(medium, external_hash(last)) for medium, there in media if there}
        return out


@given(st.data(), st.sampled_from(["", "a"]))
def test_a_router_knows_what_is_stored(data: st.DataObject, salt: str) -> None:
    stored, router, ledger = Stored(), Router(), BlockLedger(BLOCK_TOKENS, salt.encode(), DEFAULT_SEED)
    for step in range(data.draw(st.integers(1, 25))):
        leaves = [name for name in stored.chunks if not stored.is_parent(name)]
        what = data.draw(st.sampled_from(["add", "add", "move", "drop", "list"]))
        if what == "add" or not stored.chunks:
            parent = data.draw(st.sampled_from([b"root", *stored.chunks]))
            # Few tokens there are, so that siblings often begin alike and blocks have several holders.
            tokens = data.draw(st.lists(st.integers(1, 2), min_size=1, max_size=8))
            router.hear(ledger.change(KEPT, stored.add(parent, tokens, b"%d" % step)))
        elif what == "move":
            chunk = stored.chunks[data.draw(st.sampled_from([*stored.chunks]))]
            chunk.resident, chunk.durable = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
            router.hear(ledger.change(pb.EVENT_TYPE_DEMOTED, chunk))
        elif what == "drop":
            router.hear(ledger.change(GONE, stored.chunks.pop(data.draw(st.sampled_from(leaves)))))
        else:  # the daemon came back with some of it
            for name in data.draw(st.lists(st.sampled_from(leaves), unique=True)):
                del stored.chunks[name]
            router.hear(ledger.replace(reversed(stored.chunks.values())))
        assert router.blocks == stored.blocks(salt)


def test_what_is_told_twice_or_continues_nothing_changes_nothing() -> None:
    stored, ledger = Stored(), BlockLedger(BLOCK_TOKENS, b"", DEFAULT_SEED)
    first = stored.add(b"root", [1, 2, 3, 4], b"a")
    assert len(ledger.change(KEPT, first)) == 1
    assert ledger.change(KEPT, first) == []
    orphan = pb.ChunkInfo(
        prefix_hash=b"o", parent_prefix_hash=b"?", start_position=4, token_ids=[5, 6, 7], resident=True
    )
    assert ledger.change(KEPT, orphan) == []
    assert ledger.change(GONE, orphan) == []


def test_all_can_be_said_anew() -> None:
    stored, ledger, late = Stored(), BlockLedger(BLOCK_TOKENS, b"", DEFAULT_SEED), Router()
    ledger.change(KEPT, stored.add(b"root", [1, 2, 3, 4], b"a"))
    ledger.change(KEPT, stored.add(b"a", [5, 6], b"b"))
    ledger.reset()
    late.hear(ledger.replace(stored.chunks.values()))
    assert late.blocks == stored.blocks()
