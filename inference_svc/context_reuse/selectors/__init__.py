"""Token selectors, one per file: they choose the relocated tokens to recompute.

Imports ``context_reuse.reuse_plan`` and numpy. Selected tokens are recomputed as rows of an ordinary forward, in which
a row attends only to earlier positions.
"""

from inference_svc.context_reuse.selectors.baselines import ChunkEdges, NoTokens
from inference_svc.context_reuse.selectors.cacheblend import CacheBlendSelector
from inference_svc.context_reuse.selectors.guided import GuidedSelector
from inference_svc.context_reuse.selectors.salient import SalientSelector
from inference_svc.context_reuse.selectors.selector import SelectionSignals, TokenSelector

SELECTORS: dict[str, TokenSelector] = {
    selector.name: selector
    for selector in (
        NoTokens(),
        ChunkEdges(),
        CacheBlendSelector(),
        SalientSelector(),
        GuidedSelector(),
        GuidedSelector(4),
        GuidedSelector(8),
    )
}
DEFAULT_SELECTOR, DEFAULT_RATIO = "guided", 0.15
# ``--repair auto`` verifies these selectors and uses the cheapest that passes.
AUTO_SELECTORS = ("salient", DEFAULT_SELECTOR, "guided_4", "guided_8")
# ``--repair auto`` without a ratio also verifies this selector at a larger ratio.
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
