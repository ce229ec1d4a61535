"""Where an engine cuts prompts into chunks: who looks up cuts as who stored, or a remote tier's keys are not known."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.chunk_layout import MAX_CUTS


@dataclass(frozen=True)
class Cutting:
    """Chunks end at multiples of ``chunk_tokens``, and with what is stored: whole blocks of ``block_tokens``."""

    chunk_tokens: int
    block_tokens: int = 1

    @staticmethod
    def of_blocks(least_tokens: int, block_tokens: int) -> Cutting:
        """Chunks of as many whole blocks as have at least so many tokens."""
        return Cutting(-(-least_tokens // block_tokens) * block_tokens, block_tokens)

    def length(self, most: int) -> int:
        """Tokens of a chunk that is no tail, where one may have ``most``."""
        return min(self.chunk_tokens, most)

    def ends(self, start: int, stop: int, most: int) -> list[int]:
        """The ends of the chunks of tokens from ``start`` to ``stop``."""
        longest, stop = self.length(most), stop // self.block_tokens * self.block_tokens
        if start >= stop:
            return []
        return [*range(start // longest * longest + longest, stop, longest), stop]

    def known(self, tokens: int, most: int) -> list[int]:
        """Where anybody would cut a prompt of so many tokens; as many cuts as a look-up may have."""
        return self.ends(0, tokens, most)[:MAX_CUTS]
