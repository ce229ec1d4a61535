"""The scheduler connector's state of one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsidecar.integrations.vllm.pending_lookup import PendingLookup
from kvsidecar.kv_transfer.cache_hints import NO_HINTS, CacheHints


@dataclass
class TrackedRequest:
    """The connector's state of a request. ``salt`` is None if the request is not cached."""

    request: Any
    salt: bytes | None
    hints: CacheHints = NO_HINTS
    lookup: PendingLookup | None = None
    local_tokens: int = 0  # tokens that vLLM's own cache had at the lookup
    num_loading_tokens: int = 0  # end of the running load in tokens; 0 if no load runs
    loaded: bool = False  # no load again before a preemption
    known: tuple[tuple[int, bytes], ...] = ()  # for each rank, length and hash of the stored prefix
    prompt_queued: bool = False
    num_queued_tokens: int = 0  # tokens in store jobs
    began_at: float = 0.0
    computed_from: int = 0
    timed: bool = False
