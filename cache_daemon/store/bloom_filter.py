"""Counting Bloom filter over the index, in memory that workers map."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from kvsidecar import keys
from kvsidecar.bloom_filter import HEAD_TOKENS, positions
from kvsidecar.cache.v1.cache_pb2 import IndexSummary

from cache_daemon.store.chunk import Chunk

# With a million chunks, one lookup in ten is a false positive; with 100,000 chunks, one in a thousand.
SUMMARY_BYTES = 1 << 19
_SATURATED = 0xFFFF


class CountingBloomFilter:
    """Bloom filter with a counter per bit, so that bits can be cleared.

    ``memory`` is zeroed at first, and has no other writer.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._counts = array("H", bytes(len(memory) * 8 * 2))

    def add(self, chunk: Chunk) -> None:
        for n in self._bits(chunk):
            self._counts[n] = min(self._counts[n] + 1, _SATURATED)
            self._memory[n >> 3] |= 1 << (n & 7)

    def remove(self, chunk: Chunk) -> None:
        for n in self._bits(chunk):
            if self._counts[n] == _SATURATED:  # a saturated counter has lost its value, so the bit stays
                continue
            self._counts[n] -= 1
            if not self._counts[n]:
                self._memory[n >> 3] &= ~(1 << (n & 7)) & 0xFF

    def _bits(self, chunk: Chunk) -> Iterator[int]:
        header = chunk.header
        yield from positions(header.content_hash, len(self._memory))
        if header.parent_prefix_hash == header.root:
            head = keys.head_hash(header.root, chunk.ids[: HEAD_TOKENS * keys.TOKEN_BYTES])
            yield from positions(head, len(self._memory))

    def check_integrity(self, chunks: Iterable[Chunk]) -> None:
        """Raise AssertionError unless counts match the chunks, and bits the counts."""
        fresh = CountingBloomFilter(memoryview(bytearray(len(self._memory))))
        for chunk in chunks:
            fresh.add(chunk)
        assert _SATURATED in self._counts or self._counts == fresh._counts, "the summary's counts are of other chunks"
        assert bytes(self._memory) == bytes(
            sum((self._counts[at + i] > 0) << i for i in range(8)) for at in range(0, len(self._counts), 8)
        ), "the summary's bits differ from its counts"

    def describe(self) -> IndexSummary:
        """Describe the memory to a worker that maps it."""
        return IndexSummary(size_bytes=len(self._memory))
