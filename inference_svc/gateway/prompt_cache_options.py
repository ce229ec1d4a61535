"""OpenAI's ``prompt_cache_*`` options and breakpoints.

The options are hints, so the gateway accepts any value. OpenAI's lifetime is a minimum, so it becomes a retention and
not a TTL.
https://developers.openai.com/api/docs/guides/prompt-caching
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from kvsidecar.chunk_layout import MAX_TTL_SECONDS
from kvsidecar.inference.v1 import inference_pb2 as pb

from inference_svc.gateway.cache_hints import MAX_BREAKPOINTS

_LIFETIME = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DEFAULT_SECONDS = 1800  # retention of OpenAI's breakpoints without a lifetime
_MAX_KEY_CHARS = 256


def retention_seconds(options: Any, retention: Any) -> int | None:
    """Return the lifetime from ``prompt_cache_options.ttl`` or ``prompt_cache_retention``; None without both."""
    given = options.get("ttl") if isinstance(options, dict) else None
    for lifetime in (given, retention):
        found = _LIFETIME.fullmatch(lifetime) if isinstance(lifetime, str) else None
        if found is not None:
            return min(int(found[1]) * _UNIT_SECONDS[found[2]], MAX_TTL_SECONDS)
    return None


def add_retention(
    cache: pb.CacheOptions, options: Any, retention: Any, marked: Sequence[tuple[int, int | None]]
) -> None:
    """Add retentions to a worker request: of the whole prompt by the options, and of prefixes by breakpoints.

    ``marked`` has a pair for each breakpoint: the number of messages before it, and its retention in seconds (None: the
    options' lifetime). Beyond the maximum number of breakpoints, only the last ones count.
    """
    lifetime = retention_seconds(options, retention)
    by_end: dict[int, int] = {}
    for messages, seconds in marked:
        by_end[messages] = max(by_end.get(messages, 0), seconds or lifetime or _DEFAULT_SECONDS)
    for messages in sorted(by_end, reverse=True)[: MAX_BREAKPOINTS - len(cache.breakpoints)]:
        cache.breakpoints.add(messages=messages, retain_seconds=by_end[messages])
    is_explicit = isinstance(options, dict) and options.get("mode") == "explicit"
    if lifetime is not None and not is_explicit:
        cache.retain_seconds = max(cache.retain_seconds, lifetime)


def is_prewarm(options: Any) -> bool:
    """Return whether ``prompt_cache_options.prewarm`` asks to compute and store the prompt without an answer."""
    return isinstance(options, dict) and options.get("prewarm") is True


def limit_to_prompt(requests: Iterable[pb.GenerateRequest]) -> None:
    """Limit requests to the prompt and one token, because a worker always generates at least one token."""
    for request in requests:
        request.max_tokens, request.min_tokens = 1, 0
        request.ClearField("grammar")


def drop_answer(part: pb.GenerateStreamResponse, finish: pb.FinishReason.ValueType) -> None:
    """Remove the generated token from a message; the last message gets ``finish`` as its finish reason."""
    part.text = part.reasoning = ""
    del part.logprobs[:], part.token_ids[:], part.tool_calls[:]
    if part.finish_reason:
        part.finish_reason = finish
        part.usage.generated_tokens = part.usage.reasoning_tokens = 0
        part.ClearField("stopped_by")


def routing_key(key: Any) -> str:
    """Return a valid ``prompt_cache_key`` for routers; empty without one."""
    return key[:_MAX_KEY_CHARS] if isinstance(key, str) else ""
