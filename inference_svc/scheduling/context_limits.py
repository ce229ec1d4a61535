"""Context limits: the longest prompt and answer that model and pool allow."""

from __future__ import annotations

from dataclasses import dataclass

from kvsidecar.errors import PromptExceedsPool, PromptTooLong

from inference_svc.kv_pool.block_table import PAGE_TOKENS
from inference_svc.kv_pool.kv_pool import WINDOW_STEP, KVPool

# Number of token slots in the overflow, behind the tokens of a step, that get disk blocks before the step. The step and
# the draft model write draft tokens into these slots only.
LOOKAHEAD_TOKENS = 128


def peak_tokens(pool: KVPool, piece: int, tokens: int) -> int:
    """Returns the largest number of tokens for which a request has blocks at one time.

    ``tokens``: prompt and answer; ``piece``: maximum prompt tokens per step.
    """
    return min(tokens, pool.window + piece + WINDOW_STEP + PAGE_TOKENS) if pool.reclaims_window else tokens


def exceeds_pool(pool: KVPool, piece: int, tokens: int) -> bool:
    """True if a request of ``tokens`` tokens (prompt and answer) exceeds the pool."""
    return peak_tokens(pool, piece, tokens) > pool.pages * PAGE_TOKENS


@dataclass(frozen=True)
class ContextLimits:
    """Limits of prompt and answer together, in tokens.

    ``context`` is the model's limit. ``longest`` is lower if both the pool (``pages`` blocks) and its overflow
    (``overflow_pages``) are smaller.
    """

    context: int
    longest: int
    pages: int
    overflow_pages: int = 0

    @classmethod
    def of(cls, pool: KVPool, piece: int, context: int) -> ContextLimits:
        """Computes the limits of a pool. ``piece``: maximum prompt tokens per step."""
        most = max(pool.pages, pool.overflow_pages) * PAGE_TOKENS
        longest = min(context, most) if exceeds_pool(pool, piece, context) else context
        return cls(context, longest, pool.pages, pool.overflow_pages)

    def check(self, tokens: int, counted: str = "it has") -> None:
        """Refuses a prompt that leaves no token for an answer.

        Raises PromptTooLong if the model's context is the limit, PromptExceedsPool if the pool is.
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
