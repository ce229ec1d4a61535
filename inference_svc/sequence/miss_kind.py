"""Kind of a sequence's miss, for its answer and for the counters."""

from __future__ import annotations

from kvsidecar.cache.v1.cache_pb2 import MissReason
from kvsidecar.miss_kinds import miss_kind_name

from inference_svc.sequence.kv_connector import MISS_LOAD_SLOWER, MISS_UNAVAILABLE
from inference_svc.sequence.sequence import Sequence

MISS_SKIPPED, MISS_CORRUPT = "skipped", "corrupt"


def computed_tokens(sequence: Sequence) -> int:
    """Number of prompt tokens that an answer computed. The last token is always computed, so 1 means no miss."""
    return sequence.request.num_prompt_tokens - sequence.usage.num_cached


def miss_reason(sequence: Sequence) -> MissReason | str | None:
    """Return the reason of a miss, or its kind; None while the connector has not set it."""
    if not sequence.request.cache.read:
        return MISS_SKIPPED
    reason = sequence.miss.result() if sequence.miss.done() else None
    if sequence.kv.is_corrupt and reason not in (MISS_LOAD_SLOWER, MISS_UNAVAILABLE):
        return MISS_CORRUPT
    return reason


def kind_of(reason: MissReason | str) -> str:
    """Return the kind as text."""
    return reason if isinstance(reason, str) else miss_kind_name(reason.kind)
