"""The scheduler connector's state of one request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvsidecar.integrations.vllm.pending_lookup import PendingLookup
from kvsidecar.integrations.vllm.prefill_rate import PrefillRate
from kvsidecar.integrations.vllm.step_metadata import LoadJob, StoreJob
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
    began_at: float = 0.0  # monotonic time of the first step; 0 before it
    computed_from: int = 0  # tokens that were cached at the first step
    num_prefill_tokens: int = 0  # tokens that the prefill computes; 0 before the prompt's last step
    token_seconds: float | None = None  # prefill time per token, measured once; 0 if unknown

    def measure_prefill(self, rate: PrefillRate) -> None:
        """Measure the prefill time per token and record it in ``rate``, unless it was measured before."""
        if self.token_seconds is None:
            self.token_seconds = rate.record(self.num_prefill_tokens, time.monotonic() - self.began_at)

    def has_other_weights(self, lora: Any) -> bool:
        """Return whether the request uses this LoRA adapter from another folder: vLLM has loaded it again meanwhile."""
        own = self.request.lora_request
        return own is not None and own.lora_int_id == lora.lora_int_id and bool(own.lora_path != lora.lora_path)

    def load_job(self, end: int, blocks: Sequence[int], token_seconds: float) -> LoadJob:
        """Return the load of the tokens before ``end`` that vLLM's own cache does not have."""
        assert self.salt is not None
        ids = list(self.request.all_token_ids[:end])
        return LoadJob(
            self.request.request_id, ids, self.salt, list(blocks), self.local_tokens, token_seconds, self.hints
        )

    def store_job(self, end: int, blocks: Sequence[int], known: tuple[tuple[int, bytes], ...]) -> StoreJob:
        """Return the store of the tokens before ``end``."""
        assert self.salt is not None
        return StoreJob(
            self.request.request_id,
            list(self.request.all_token_ids[:end]),
            self.salt,
            list(blocks),
            known,
            self.token_seconds,
            self.num_prefill_tokens,
            self.began_at,
            self.hints,
        )
