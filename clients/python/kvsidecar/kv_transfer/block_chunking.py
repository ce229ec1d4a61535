"""Chunk boundaries of an engine's prompts.

All engines that share a remote tier must use the same boundaries for lookups and stores, because the boundaries
determine the tier's keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.chunk_layout import MAX_CUTS


@dataclass(frozen=True)
class BlockChunking:
    """Chunks of whole blocks that end at multiples of ``chunk_tokens``, or at the end of the prompt."""

    chunk_tokens: int
    block_tokens: int = 1

    @staticmethod
    def of_blocks(min_tokens: int, block_tokens: int) -> BlockChunking:
        """Use the smallest number of whole blocks that has at least ``min_tokens`` tokens."""
        return BlockChunking(-(-min_tokens // block_tokens) * block_tokens, block_tokens)

    def full_length(self, max_tokens: int) -> int:
        """Return the length of a full chunk, if the daemon allows at most ``max_tokens``."""
        return min(self.chunk_tokens, max_tokens)

    def boundaries(self, start: int, stop: int, max_tokens: int) -> list[int]:
        """Return the ends of the chunks between tokens ``start`` and ``stop``."""
        longest, stop = self.full_length(max_tokens), stop // self.block_tokens * self.block_tokens
        if start >= stop:
            return []
        return [*range(start // longest * longest + longest, stop, longest), stop]

    def shared_boundaries(self, tokens: int, max_tokens: int) -> list[int]:
        """Return the chunk ends that all engines use, but at most as many as a Match may contain."""
        return self.boundaries(0, tokens, max_tokens)[:MAX_CUTS]
