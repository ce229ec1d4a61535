"""Repair strategies, one per file: which approximate tokens are computed again with their true context.

All are rows through the same forward, so that none sees the future: a row attends to earlier positions only.
"""

from inference_svc.context_reuse.selectors.cacheblend import CacheBlendSelector
from inference_svc.context_reuse.selectors.first_k import FirstTokens
from inference_svc.context_reuse.selectors.guided import GuidedSelector
from inference_svc.context_reuse.selectors.none import NoTokens
from inference_svc.context_reuse.selectors.random_tokens import RandomTokens
from inference_svc.context_reuse.selectors.salient import SalientSelector
from inference_svc.context_reuse.selectors.selective import ChunkEdges
from inference_svc.context_reuse.selectors.selector import SelectionSignals, TokenSelector

SELECTORS: dict[str, TokenSelector] = {
    r.name: r
    for r in (
        NoTokens(),
        RandomTokens(),
        FirstTokens(),
        ChunkEdges(),
        CacheBlendSelector(),
        SalientSelector(),
        GuidedSelector(),
        GuidedSelector(4),
        GuidedSelector(8),
    )
}
DEFAULT_SELECTOR, DEFAULT_RATIO = "guided", 0.15
# What a verification tries when it is to find out: what is cheaper is taken where it passes.
AUTO_SELECTORS = ("salient", DEFAULT_SELECTOR, "guided_4", "guided_8")
# What it tries more of the tokens with when it is to find that out, too.
THOROUGH_SELECTOR, THOROUGH_RATIO = "salient", 0.3


__all__ = [
    "AUTO_SELECTORS",
    "DEFAULT_RATIO",
    "DEFAULT_SELECTOR",
    "SELECTORS",
    "THOROUGH_RATIO",
    "THOROUGH_SELECTOR",
    "SelectionSignals",
    "TokenSelector",
]
