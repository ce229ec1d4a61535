"""What a request needs of the pool, next and at its peak, and so how long one may be."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.errors import PromptExceedsPool, PromptTooLong

from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.kv_pool import WINDOW_STEP, KVPool

# In the overflow, so many tokens behind those of a pass have room on disk before it: guesses are written there, by who
# makes them too, and never further.
LOOKAHEAD_TOKENS = 128


def peak_tokens(pool: KVPool, piece: int, tokens: int) -> int:
    """For how many tokens a request holds pages at most that has so many with its answer, computed in pieces of so
    many."""
    return min(tokens, pool.window + piece + WINDOW_STEP + PAGE_TOKENS) if pool.reclaims_window else tokens


def exceeds_pool(pool: KVPool, piece: int, tokens: int) -> bool:
    """Whether a request of so many tokens with its answer needs more than all of the pool."""
    return peak_tokens(pool, piece, tokens) > pool.pages * PAGE_TOKENS


@dataclass(frozen=True)
class PoolCapacity:
    """How many tokens a prompt and its answer may have together: ``context`` by the model, ``longest`` where the pool's
    ``pages`` hold fewer, and its overflow's, too."""

    context: int
    longest: int
    pages: int
    overflow_pages: int = 0

    @classmethod
    def of(cls, pool: KVPool, piece: int, context: int) -> PoolCapacity:
        """``piece`` tokens of a prompt are computed at once."""
        most = max(pool.pages, pool.overflow_pages) * PAGE_TOKENS
        longest = min(context, most) if exceeds_pool(pool, piece, context) else context
        return cls(context, longest, pool.pages, pool.overflow_pages)

    def check(self, tokens: int, counted: str = "it has") -> None:
        """Refuses a prompt that leaves no room for an answer. Raises PromptTooLong, and where it is the pool that is
        too small for it, PromptExceedsPool."""
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
