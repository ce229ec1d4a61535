"""Eviction policies: an interface, the default ``gittins``, and the baseline ``lru``.

A policy chooses the chunk that a full tier evicts next, and decides whether the tier admits a new chunk. Imports
nothing of the daemon. docs/eviction.md describes how a tier calls its policy, and why ``gittins`` is the default. The
policies that both were compared with are in ``benchmarks/eviction_policies.py``.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from cache_daemon.eviction.eviction_policy import Entry, EvictionPolicy
from cache_daemon.eviction.gittins import Gittins
from cache_daemon.eviction.lru import LeastRecentlyUsed

DEFAULT = "gittins"
POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = MappingProxyType({"lru": LeastRecentlyUsed, "gittins": Gittins})

__all__ = ["DEFAULT", "POLICIES", "Entry", "EvictionPolicy", "Gittins", "LeastRecentlyUsed"]
