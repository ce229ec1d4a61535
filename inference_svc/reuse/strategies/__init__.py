"""Repair strategies, one per file: which approximate tokens are computed again with their true context.

All are rows through the same forward, so that none sees the future: a row attends to earlier positions only.
"""

from inference_svc.reuse.strategies.base import Repair, Signals
from inference_svc.reuse.strategies.cacheblend import CacheBlend
from inference_svc.reuse.strategies.first_k import FirstK
from inference_svc.reuse.strategies.guided import Guided
from inference_svc.reuse.strategies.none import NoRepair
from inference_svc.reuse.strategies.random_tokens import RandomTokens
from inference_svc.reuse.strategies.selective import Selective

STRATEGIES: dict[str, Repair] = {
    r.name: r for r in (NoRepair(), RandomTokens(), FirstK(), Selective(), CacheBlend(), Guided(), Guided(4), Guided(6))
}
DEFAULT = "guided"

__all__ = ["DEFAULT", "STRATEGIES", "Repair", "Signals"]
