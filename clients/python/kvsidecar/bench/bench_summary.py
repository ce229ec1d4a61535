"""Summarizes the answers of a benchmark phase: percentiles, throughput, hit ratio."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvsidecar.bench.load_generator import RequestResult

_SHARES = (50, 90, 99)


def summarize(answers: Sequence[RequestResult], seconds: float) -> dict[str, Any]:
    """Summarize one phase of ``seconds``.

    Times are in milliseconds. A value is None if it was not measured, or if the server does not report it.
    """
    good = [a for a in answers if not a.why]
    prompt_tokens = sum(a.prompt_tokens for a in good)
    cached = [a.cached_tokens for a in good if a.cached_tokens is not None]
    generated = sum(a.generated_tokens for a in good)
    return {
        "requests": len(answers),
        "failed": len(answers) - len(good),
        "reasons": dict(Counter(a.why for a in answers if a.why).most_common(3)),
        "seconds": round(seconds, 3),
        "ttft_ms": _percentiles([a.first_token for a in good]),
        "inter_token_ms": _percentiles([gap for a in good for gap in a.between]),
        "whole_ms": _percentiles([a.whole for a in good]),
        "prompt_tokens": prompt_tokens,
        "cached_share": round(sum(cached) / prompt_tokens, 4) if cached and prompt_tokens else None,
        "generated_tokens": generated,
        "requests_per_s": round(len(good) / seconds, 3),
        "prompt_tokens_per_s": round(prompt_tokens / seconds, 1),
        "generated_tokens_per_s": round(generated / seconds, 1),
    }


def speedup(first: dict[str, Any], again: dict[str, Any]) -> float | None:
    """Return the ratio of the median TTFT without and with a cached prefix."""
    before, after = first["ttft_ms"], again["ttft_ms"]
    return round(before["p50"] / after["p50"], 2) if before and after and after["p50"] else None


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = sorted(s * 1e3 for s in seconds)
    found = {f"p{share}": values[min(len(values) - 1, len(values) * share // 100)] for share in _SHARES}
    found |= {"p50": statistics.median(values), "mean": statistics.fmean(values)}
    return {name: round(value, 2) for name, value in found.items()}
