"""``kvsidecar cost``: estimates the savings per day by cache hits.

The estimate uses the measured prefill time and hit ratio.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from kvsidecar.cache.v1 import cache_pb2
from kvsidecar.cli.cache.daemon_target import at_daemon
from kvsidecar.cli.worker_client import Address, connected, console
from kvsidecar.client import Client
from kvsidecar.errors import InvalidRequest, KVSidecarError

_DAY, _HOUR = 86_400.0, 3_600.0
# Prefill is measured at the usual prompt length, within the first two limits: longer prompts give no better estimate.
# The third number is the number of measurements.
_LEAST_TOKENS, _MOST_TOKENS, _TIMES = 128, 2048, 3


@dataclass(frozen=True)
class Savings:
    """Savings since the daemon's start. Times are in seconds."""

    uptime_s: float
    prompts: int
    prompt_tokens: int
    cached_tokens: int
    prefill_s_per_token: float
    """Prefill time per token, measured now with one request at a time, at the usual prompt length."""
    hour_price: float
    """Hourly price of the worker's machine; 0 if unknown."""

    @property
    def share(self) -> float:
        """Share of prompt tokens that came from the cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def saved_s(self) -> float:
        """Prefill time that workers saved."""
        return self.cached_tokens * self.prefill_s_per_token

    @property
    def saved_s_per_day(self) -> float:
        """Saved time per day, extrapolated."""
        return self.saved_s / self.uptime_s * _DAY

    @property
    def money_per_day(self) -> float:
        return self.saved_s_per_day / _HOUR * self.hour_price

    def as_dict(self) -> dict[str, Any]:
        """Return all values, for JSON."""
        names = ("share", "saved_s", "saved_s_per_day", "money_per_day")
        return asdict(self) | {name: getattr(self, name) for name in names}


@at_daemon
def cost(
    stub: Any,
    worker: Address = None,
    hour_price: Annotated[float, typer.Option(min=0.0, help="Hourly price of the worker's machine.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate savings by cache hits: prompt tokens not computed, their prefill time, and its price.

    Measures the prefill time per token on a worker now, with a few prompts that skip the cache and do not count in its
    statistics. Requests that skip the cache are excluded. The time for loading stored chunks is not subtracted.
    """
    stats = stub.Stats(cache_pb2.StatsRequest(), timeout=10)
    if not stats.prompts:
        raise InvalidRequest(
            "no prompt was served since the cache daemon's start; ask something, and again in a moment"
        )
    with connected(worker) as client:
        price = prefill_seconds(client, stats.prompt_tokens // stats.prompts)
    found = Savings(stats.uptime_seconds, stats.prompts, stats.prompt_tokens, stats.cached_tokens, price, hour_price)
    if as_json:
        print(json.dumps(found.as_dict()))
        return
    for line in sentences(found):
        console.print(line, highlight=False)


def prefill_seconds(client: Client, tokens: int) -> float:
    """Measure a worker's prefill time per token, at a prompt length of ``tokens``.

    Returns the minimum of several tries, since other requests may run meanwhile.
    """
    model = client.model()
    tokens = max(1, min(max(tokens, _LEAST_TOKENS), _MOST_TOKENS, model.context_length - 1))
    rng = random.Random()
    least = float("inf")
    for _ in range(_TIMES):
        ids = [rng.randrange(model.vocab_size) for _ in range(tokens)]
        made = client.generate(ids, max_tokens=1, temperature=0, ignore_eos=True, skip_cache=True, deadline=600)
        least = min(least, made.timings["prefill_ms"])
    if not 0 < least < float("inf"):
        raise KVSidecarError("the worker did not say how long a prefill took")
    return least / 1e3 / tokens


def sentences(found: Savings) -> list[str]:
    """Describe the savings in sentences."""
    out = [
        f"Since the daemon's start {_span(found.uptime_s)} ago workers served {found.prompts:,} prompts of "
        f"{found.prompt_tokens:,} tokens; {found.share:.0%} of these were not computed anew.",
        f"Computing a token takes {found.prefill_s_per_token * 1e3:.3g} ms here, measured now: so reuse saved "
        f"{_span(found.saved_s)} of prefill, and saves {_span(found.saved_s_per_day)} a day if it goes on like this.",
    ]
    if found.hour_price:
        out.append(
            f"At {found.hour_price:g} an hour that is {found.money_per_day:,.2f} a day, "
            f"{found.money_per_day * 30:,.2f} in 30 days."
        )
    else:
        out.append("With --hour-price it is said in money, too.")
    return out


def _span(seconds: float) -> str:
    """Format a duration in its two largest units."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"
