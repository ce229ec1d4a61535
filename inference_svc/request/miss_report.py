"""Report of a miss: its kind as text, one sentence, and one about a remedy."""

from __future__ import annotations

import asyncio

from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.sequence.sequence import Sequence

# The daemon answers long before a prefill ends; an answer that does not come must not delay the last token.
_WAIT_SECONDS = 0.05
_SENTENCES = {
    "never_seen": (
        "the daemon has not seen these tokens behind this beginning in the last {remembered:.0f} s",
        "text that changes, such as a date, belongs behind text that stays the same",
    ),
    "differs": (
        "token {position} differs from that of an earlier prompt or answer with the same beginning",
        "move the text that changes behind the text that stays the same, such as documents and instructions",
    ),
    "other_tenant": ("these tokens are known under another salt", "use one salt for requests that may share text"),
    "other_namespace": ("these tokens are known in another namespace ({by})", "use the same model and settings"),
    "evicted": (
        "the tokens were evicted {ago:.0f} s ago, because the {by} was full",
        "enlarge --store-bytes or --arena-bytes, or pin the prefix",
    ),
    "quota": ("the tenant's quota ({by}) evicted or refused the tokens {ago:.0f} s ago", "raise the tenant's quota"),
    "expired": ("the TTL of the tokens expired {ago:.0f} s ago", "set a longer ttl_seconds"),
    "deleted": ("a caller deleted the tokens {ago:.0f} s ago", ""),
    "not_stored": (
        "an earlier prompt had these tokens, and they are not stored, or not yet",
        "send the prompt again once the first answer is complete, without skip_write",
    ),
    "corrupt": ("the stored tokens were corrupt and were removed {ago:.0f} s ago", "look at the daemon's log"),
    "arena_full": ("the tokens are on disk, but the arena has no space for them now", "enlarge --arena-bytes"),
    "load_slower": ("loading was slower than computing, so the cache was bypassed", ""),
    "reuse_off": (
        "text of this prompt is stored behind other text, and reuse anywhere is off or not verified",
        "kvsidecar serve --reuse-anywhere, or reuse_anywhere in the request",
    ),
    "skipped": ("the request asked to skip the cache", ""),
    "unavailable": ("no cache daemon answered", "look at kvsidecar status"),
    "unknown": ("the reason is unknown", ""),
}


async def add_miss(sequence: Sequence, part: pb.GenerateStreamResponse, *, wait: bool) -> None:
    """Add the reason to an answer's last message, if more than the prompt's last token was computed.

    Without ``wait`` a reason that is not there yet is "unknown".
    """
    computed = sequence.request.num_prompt_tokens - sequence.usage.num_cached
    if computed <= 1:
        return
    if not sequence.request.cache.read:
        _write(part.miss, "skipped", computed, 0)
        return
    if sequence.kv.load_failed:
        _write(part.miss, "corrupt", computed, 0)
        return
    if wait and not sequence.miss.done():
        await asyncio.wait({asyncio.wrap_future(sequence.miss)}, timeout=_WAIT_SECONDS)
    found = sequence.miss.result() if sequence.miss.done() else "unknown"
    if isinstance(found, str):
        _write(part.miss, found, computed, sequence.usage.num_cached)
        return
    kind = cache_pb2.MissKind.Name(found.kind).removeprefix("MISS_KIND_").lower().replace("unspecified", "unknown")
    part.miss.seconds_ago, part.miss.by, part.miss.remembered_seconds = (
        found.seconds_ago,
        found.by,
        found.remembered_seconds,
    )
    _write(part.miss, kind, computed, found.position)


def _write(miss: pb.MissReason, kind: str, computed: int, position: int) -> None:
    sentence, advice = _SENTENCES[kind]
    miss.kind, miss.computed_tokens, miss.position, miss.advice = kind, computed, position, advice
    values = {"by": miss.by, "ago": miss.seconds_ago, "remembered": miss.remembered_seconds}
    miss.sentence = sentence.format(position=position, **values)
