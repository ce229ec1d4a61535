"""Miss report: the kind of a miss, a sentence about the cause, and a remedy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvsidecar.inference.v1 import inference_pb2 as pb
from kvsidecar.miss_kinds import MISS_UNKNOWN

from inference_svc.context_reuse.reuse_state import ReuseState
from inference_svc.sequence.kv_connector import MISS_REPAIR_SLOWER
from inference_svc.sequence.miss_kind import computed_tokens, kind_of, miss_reason
from inference_svc.sequence.sequence import Sequence

# Maximum wait for the reason. The daemon usually answers long before a prefill ends; the last token must not wait
# longer.
_WAIT_SECONDS = 0.05
_REUSE_OFF = "reuse_off"
_SENTENCES = {
    "never_seen": (
        "the daemon has not seen these tokens behind this beginning in the last {remembered:.0f} s",
        "text that changes, such as a date, belongs behind text that stays the same, such as documents",
    ),
    "differs": (
        "token {position} differs from that of an earlier prompt or answer with the same beginning",
        "move the text that changes, such as a date, behind the text that stays the same, such as documents",
    ),
    "other_tenant": ("these tokens are known under another salt", "use one salt for requests that may share text"),
    "other_namespace": (
        "these tokens are known for another model or other settings ({by})",
        "send requests that share text to workers with the same model and settings",
    ),
    "evicted": (
        "the tokens were evicted {ago:.0f} s ago, because the {by} was full",
        "enlarge the store with {flag}, or pin the prefix with kvsidecar cache pin",
    ),
    "quota": (
        "the tenant's quota of the {by} evicted or refused the tokens {ago:.0f} s ago",
        "raise the tenant's quota in the tenants file",
    ),
    "expired": (
        "the TTL of the tokens expired {ago:.0f} s ago",
        "set a longer cache_ttl_seconds, or a longer default in the tenants file",
    ),
    "deleted": (
        "a caller deleted the tokens {ago:.0f} s ago",
        "prefill texts that come back with kvsidecar warm, after the last deletion",
    ),
    "not_stored": (
        "an earlier prompt had these tokens, and they are not stored, or not yet",
        "send the prompt again once the first answer is complete and stored",
    ),
    "corrupt": (
        "the stored tokens were corrupt and were removed",
        "look at the daemon's log, and check the disk with kvsidecar cache verify",
    ),
    "arena_full": (
        "the tokens are on disk, but the arena has no space for them now",
        "enlarge the arena with --arena-bytes",
    ),
    "load_slower": (
        "loading takes longer than computing",
        "a larger --arena-bytes, a faster disk or link makes loads quicker; every sixteenth request tries again",
    ),
    MISS_REPAIR_SLOWER: (
        "text of this prompt is stored behind other text, and its repair takes longer than computing it",
        "longer documents, and a shorter question behind them, make the repair faster than computing",
    ),
    _REUSE_OFF: (
        "text of this prompt is stored behind other text, and {by}",
        "start the node with --reuse-anywhere, or set reuse_anywhere in the request",
    ),
    "skipped": (
        "the request reads no cache (skip_cache, or log probabilities of its prompt)",
        "leave out skip_cache and prompt_logprobs",
    ),
    "unavailable": (
        "no cache daemon answered, or its connection ended",
        "look at kvsidecar status, and start the daemon",
    ),
    MISS_UNKNOWN: ("the reason is unknown", "look at the daemon's log"),
}
_FLAGS = {"arena": "--arena-bytes", "disk": "--store-bytes", "index": "--index-bytes"}


class MissReporter:
    """Adds reasons of misses to answers. Runs on the event loop.

    ``reuse_state`` returns the worker's state of approximate reuse.
    """

    def __init__(self, reuse_state: Callable[[], ReuseState]) -> None:
        self._reuse_state = reuse_state

    async def add(self, sequence: Sequence, part: pb.GenerateStreamResponse, *, wait: bool) -> None:
        """Add the reason to an answer's last message, if more than the prompt's last token was computed.

        Without ``wait``, a reason that has not arrived is reported as "unknown".
        """
        computed, reason = computed_tokens(sequence), miss_reason(sequence)
        if computed <= 1:
            return
        if reason is None and wait:
            await asyncio.wait({asyncio.wrap_future(sequence.miss)}, timeout=_WAIT_SECONDS)
            reason = miss_reason(sequence)
        reason, miss = reason or MISS_UNKNOWN, part.miss
        miss.kind, miss.computed_tokens = kind_of(reason), computed
        if isinstance(reason, str):
            miss.position = sequence.usage.num_cached
        else:
            miss.position, miss.seconds_ago, miss.by = reason.position, reason.seconds_ago, reason.by
            miss.remembered_seconds = reason.remembered_seconds
        if miss.kind == _REUSE_OFF:
            miss.by = self._why_exact(sequence)
        self._write(miss, sequence.request.num_prompt_tokens)

    def _why_exact(self, sequence: Sequence) -> str:
        """Return the reason why the request may not use relocated chunks."""
        state = self._reuse_state()
        if state.policy.enabled and not sequence.request.cache.reuse_anywhere:
            return "the request asks for exact reuse"
        return state.sentence

    @staticmethod
    def _write(miss: pb.MissReason, tokens: int) -> None:
        sentence, advice = _SENTENCES[miss.kind]
        values = {"by": miss.by, "ago": miss.seconds_ago, "remembered": miss.remembered_seconds}
        found = sentence.format(position=miss.position, **values)
        miss.sentence = f"{tokens - miss.computed_tokens} of {tokens} prompt tokens were cached: {found}"
        miss.advice = advice.format(flag=_FLAGS.get(miss.by, "--store-bytes or --arena-bytes"))
