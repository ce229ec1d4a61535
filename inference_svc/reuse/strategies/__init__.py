"""Repair strategies, one per file: which approximate tokens are computed again with their true context.

All are rows through the same forward, so that none sees the future: a row attends to earlier positions only.
"""

from inference_svc.reuse.strategies.base import Repair, Signals
from inference_svc.reuse.strategies.cacheblend import CacheBlend
from inference_svc.reuse.strategies.first_k import FirstK
from inference_svc.reuse.strategies.guided import Guided
from inference_svc.reuse.strategies.none import NoRepair
from inference_svc.reuse.strategies.random_tokens import RandomTokens
from inference_svc.reuse.strategies.salient import Salient
from inference_svc.reuse.strategies.selective import Selective

STRATEGIES: dict[str, Repair] = {
    r.name: r
    for r in (
        NoRepair(),
        RandomTokens(),
        FirstK(),
        Selective(),
        CacheBlend(),
        Salient(),
        Guided(),
        Guided(4),
        Guided(8),
    )
}
DEFAULT = "guided"
# What a verification tries, cheapest first, when it is to find out.
AUTO = (DEFAULT, "guided_4", "guided_8")


def candidates(name: str) -> tuple[str, ...]:
    """What a verification of a setting measures: the repair of that name, or those of ``auto``."""
    return AUTO if name == "auto" else (name,)


__all__ = ["AUTO", "DEFAULT", "STRATEGIES", "Repair", "Signals", "candidates"]
