"""Eviction policies: an interface, the default ``gittins``, and ``lru`` as a yardstick.

A policy says which chunk a full tier gives up first, and whether the tier takes a new one. Imports nothing of the
daemon. How a tier calls its policy, and why ``gittins`` is the default: docs/eviction.md. The policies that both were
compared with are in ``benchmarks/eviction_policies.py``.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from cache_daemon.eviction.eviction_policy import Entry, EvictionPolicy
from cache_daemon.eviction.gittins import Gittins
from cache_daemon.eviction.lru import LeastRecentlyUsed

DEFAULT = "gittins"
POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = MappingProxyType({"lru": LeastRecentlyUsed, "gittins": Gittins})

__all__ = ["DEFAULT", "POLICIES", "Entry", "EvictionPolicy", "Gittins", "LeastRecentlyUsed"]
