"""Which chunk a full tier gives up first, and whether it takes a new one: an interface and five policies.

Imports nothing of the daemon. How a tier calls its policy, and why ``gittins`` is the default: docs/eviction.md.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from cache_daemon.eviction.eviction_policy import Entry, EvictionPolicy
from cache_daemon.eviction.gittins import Gittins
from cache_daemon.eviction.ranked import GreedyDualSizeFrequency, LeastFrequentlyUsed, LeastRecentlyUsed
from cache_daemon.eviction.s3fifo import S3Fifo

DEFAULT = "gittins"
POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = MappingProxyType(
    {
        "lru": LeastRecentlyUsed,
        "lfu": LeastFrequentlyUsed,
        "s3fifo": S3Fifo,
        "gdsf": GreedyDualSizeFrequency,
        "gittins": Gittins,
    }
)

__all__ = [
    "DEFAULT",
    "POLICIES",
    "Entry",
    "EvictionPolicy",
    "Gittins",
    "GreedyDualSizeFrequency",
    "LeastFrequentlyUsed",
    "LeastRecentlyUsed",
    "S3Fifo",
]
