"""Repair strategies, one per file: which approximate tokens are computed again with their true context.

All are rows through the same forward, so that none sees the future: a row attends to earlier positions only.
"""

from inference_svc.context_reuse.selectors.cacheblend import CacheBlend
from inference_svc.context_reuse.selectors.guided import Guided
from inference_svc.context_reuse.selectors.none import NoRepair
from inference_svc.context_reuse.selectors.salient import Salient
from inference_svc.context_reuse.selectors.selective import Selective
from inference_svc.context_reuse.selectors.selector import Repair, Signals

STRATEGIES: dict[str, Repair] = {
    r.name: r
    for r in (
        NoRepair(),
        Selective(),
        CacheBlend(),
        Salient(),
        Guided(),
        Guided(4),
        Guided(8),
    )
}
DEFAULT, DEFAULT_RATIO = "guided", 0.15
# What a verification tries when it is to find out: what is cheaper is taken where it passes.
AUTO = ("salient", DEFAULT, "guided_4", "guided_8")
# What it tries more of the tokens with when it is to find that out, too.
THOROUGH, THOROUGH_RATIO = "salient", 0.3


__all__ = ["AUTO", "DEFAULT", "DEFAULT_RATIO", "STRATEGIES", "THOROUGH", "THOROUGH_RATIO", "Repair", "Signals"]
