"""Settings of a store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import inf

from cache_daemon.eviction.eviction_policy import EvictionPolicy
from cache_daemon.store.store_clock import WallClock


@dataclass(frozen=True)
class StoreConfig:
    """Settings of a store.

    ``max_index_bytes`` limits ``PrefixIndex.memory_bytes``. ``clock`` returns Unix seconds that never decrease;
    ``span(name)`` traces work on threads.
    """

    new_policy: Callable[[], EvictionPolicy]
    durable_budget_bytes: int = 0
    staging_bytes: int = 64 << 20
    max_index_bytes: float = inf
    clock: Callable[[], float] = field(default_factory=WallClock)
    span: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext()
