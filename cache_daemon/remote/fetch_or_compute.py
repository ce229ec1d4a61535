"""Fetch or compute: decides how much of a prompt is faster to fetch than to compute."""

from __future__ import annotations

from collections.abc import Sequence

from cache_daemon.remote.latency_model import LatencyModel
from cache_daemon.remote.remote_record import RemoteRecord
from cache_daemon.store.lookup import FetchHints

# The timeout of a lookup is a multiple of the usual latency, between a minimum and a maximum. It never exceeds a share
# of the time to compute the prompt.
_LOOKUP_SECONDS, _LOOKUP_LATENCY_FACTOR, _LOOKUP_MAX_SECONDS, _LOOKUP_SHARE = 0.25, 8.0, 1.0, 0.5
# Longest fetch, even if the prefill cost is unknown.
_MAX_FETCH_SECONDS = 10.0


class FetchOrCompute:
    """Compares the remote tier's latency model with the prefill cost of callers.

    ``prefill_seconds`` is the time in which the caller could compute all missing chunks; 0 if unknown.
    """

    def __init__(self, latency: LatencyModel) -> None:
        self._latency = latency

    def computing_is_faster(self, prefill_seconds: float) -> bool:
        """Return True if computing takes less time than the round trips of any fetch."""
        return 0 < prefill_seconds < self._latency.estimate_seconds(0, 2)

    def lookup_timeout(self, hints: FetchHints, prefill_seconds: float) -> float:
        """Return the longest time in seconds that a lookup may take."""
        usual = min(_LOOKUP_MAX_SECONDS, max(_LOOKUP_SECONDS, _LOOKUP_LATENCY_FACTOR * self._latency.latency_seconds))
        return min(usual, hints.timeout_seconds, prefill_seconds * _LOOKUP_SHARE or usual)

    def wait_timeout(self, hints: FetchHints, prefill_seconds: float) -> float:
        """Return the longest time in seconds to wait for another request's fetch of the same chunks."""
        return min(hints.timeout_seconds, prefill_seconds or _LOOKUP_SECONDS)

    def choose(
        self, hints: FetchHints, records: Sequence[RemoteRecord], tokens: Sequence[int], spent: float
    ) -> tuple[int, float]:
        """Count the leading records that arrive before they could be computed, and return the fetch's time limit.

        ``tokens[n]`` is the number of tokens that the caller would compute up to the end of record ``n``. ``spent`` is
        the time since the request, in seconds. The count is 0 if computing is faster.
        """
        deadlines = _prefill_deadlines(hints.seconds_per_token, records, tokens)
        longest = min(hints.timeout_seconds, _MAX_FETCH_SECONDS)
        size = chosen = 0
        for n, (record, computed) in enumerate(zip(records, deadlines, strict=True), 1):
            size += record.stored_length
            takes = self._latency.estimate_seconds(size)
            if takes <= longest - spent and takes <= computed:
                chosen = n
        return chosen, (min(deadlines[chosen - 1], longest) - spent if chosen else 0.0)


def _prefill_deadlines(seconds_per_token: float, records: Sequence[RemoteRecord], tokens: Sequence[int]) -> list[float]:
    """Return for each record the seconds in which the caller could compute the tokens up to its end.

    Without ``seconds_per_token``, the prefill times in the records count.
    """
    out, known = [], 0.0
    for record, ahead in zip(records, tokens, strict=False):
        known += record.header.prefill_seconds
        out.append(seconds_per_token * ahead or known or _MAX_FETCH_SECONDS)
    return out
