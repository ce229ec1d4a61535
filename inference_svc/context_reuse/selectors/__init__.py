"""Token selectors, one per file: which relocated tokens are recomputed in their true context.

Imports ``context_reuse.reuse_plan`` and numpy. Selected tokens are rows of an ordinary forward, in which a row attends
to earlier positions only.
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
# ``--repair auto`` verifies these; of those that pass, the cheapest is used.
AUTO_SELECTORS = ("salient", DEFAULT_SELECTOR, "guided_4", "guided_8")
# ``--repair auto`` without a ratio verifies this selector at a larger ratio, too.
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
