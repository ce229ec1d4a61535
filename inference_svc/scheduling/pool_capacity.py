"""Pool capacity: the pages that a request needs, and the longest request that fits."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.errors import PromptExceedsPool, PromptTooLong

from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.kv_pool import WINDOW_STEP, KVPool

# In the overflow, so many tokens behind those of a pass have room on disk before it: guesses are written there, by who
# makes them too, and never further.
LOOKAHEAD_TOKENS = 128


def peak_tokens(pool: KVPool, piece: int, tokens: int) -> int:
    """Returns the largest number of tokens for which a request holds pages at one time.

    ``tokens`` of prompt and answer are computed in pieces of ``piece``.
    """
    return min(tokens, pool.window + piece + WINDOW_STEP + PAGE_TOKENS) if pool.reclaims_window else tokens


def exceeds_pool(pool: KVPool, piece: int, tokens: int) -> bool:
    """True if a request of ``tokens`` tokens with its answer needs more than the whole pool."""
    return peak_tokens(pool, piece, tokens) > pool.pages * PAGE_TOKENS


@dataclass(frozen=True)
class PoolCapacity:
    """Limits of prompt and answer together, in tokens.

    ``context`` is the model's limit; ``longest`` is lower where the pool's ``pages``, and its overflow's, hold fewer.
    """

    context: int
    longest: int
    pages: int
    overflow_pages: int = 0

    @classmethod
    def of(cls, pool: KVPool, piece: int, context: int) -> PoolCapacity:
        """Computes the limits of a pool; ``piece`` tokens of a prompt are computed at once."""
        most = max(pool.pages, pool.overflow_pages) * PAGE_TOKENS
        longest = min(context, most) if exceeds_pool(pool, piece, context) else context
        return cls(context, longest, pool.pages, pool.overflow_pages)

    def check(self, tokens: int, counted: str = "it has") -> None:
        """Refuses a prompt that leaves no token for an answer.

        Raises PromptTooLong, or PromptExceedsPool where the pool is the limit.
        """
        if tokens < self.longest:
            return
        if tokens >= self.context:
            raise PromptTooLong(
                f"the prompt is too long: {counted} {tokens} tokens, and the maximum context length is {self.context} "
                "with one token of answer at least"
            )
        beyond = f" and its overflow {self.overflow_pages}" if self.overflow_pages else ""
        raise PromptExceedsPool(
            f"the prompt is too long: {counted} {tokens} tokens, which with one of answer need "
            f"{-(-(tokens + 1) // PAGE_TOKENS)} pages of {PAGE_TOKENS} tokens; this worker's pool has "
            f"{self.pages}{beyond}, so at most {self.longest} tokens are allowed (of the {self.context} that the model "
            "allows): shorten it, or start the worker with a larger --pool-bytes or --overflow-bytes"
        )
