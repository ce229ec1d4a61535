"""Where an engine cuts prompts into chunks: who looks up cuts as who stored, or a remote tier's keys are not known."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.chunk_layout import MAX_CUTS


@dataclass(frozen=True)
class BlockChunking:
    """Chunks end at multiples of ``chunk_tokens``, and with what is stored: whole blocks of ``block_tokens``."""

    chunk_tokens: int
    block_tokens: int = 1

    @staticmethod
    def of_blocks(min_tokens: int, block_tokens: int) -> BlockChunking:
        """Chunks of as many whole blocks as have at least so many tokens."""
        return BlockChunking(-(-min_tokens // block_tokens) * block_tokens, block_tokens)

    def full_length(self, max_tokens: int) -> int:
        """Tokens of a chunk that is no tail, where one may have ``max_tokens``."""
        return min(self.chunk_tokens, max_tokens)

    def boundaries(self, start: int, stop: int, max_tokens: int) -> list[int]:
        """The ends of the chunks of tokens from ``start`` to ``stop``."""
        longest, stop = self.full_length(max_tokens), stop // self.block_tokens * self.block_tokens
        if start >= stop:
            return []
        return [*range(start // longest * longest + longest, stop, longest), stop]

    def shared_boundaries(self, tokens: int, max_tokens: int) -> list[int]:
        """Where anybody would cut a prompt of so many tokens; as many cuts as a look-up may have."""
        return self.boundaries(0, tokens, max_tokens)[:MAX_CUTS]
