"""Heartbeats of an attached session: their timeout and their totals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvsidecar.cache.v1 import cache_pb2 as pb
from kvsidecar.errors import InvalidRequest

from cache_daemon.rpc.request_decoder import decode_request
from cache_daemon.rpc.request_validation import MAX_TOTAL, check_max

_MISSED_HEARTBEATS = 3
# Lower bound of the timeout, for short heartbeat intervals: a client may be late because the CPU is busy.
_MIN_TIMEOUT_SECONDS = 2.0


class Heartbeats:
    """Messages of one Attach stream: the hello, then heartbeats every ``interval_ms``."""

    def __init__(self, messages: AsyncIterator[pb.AttachRequest], interval_ms: int) -> None:
        self._messages = aiter(messages)
        self.timeout_seconds = max(interval_ms * _MISSED_HEARTBEATS / 1000, _MIN_TIMEOUT_SECONDS)

    async def receive(self) -> pb.AttachRequest | None:
        """Return the next message; None at the end of the stream. Raises TimeoutError when it is late."""
        async with asyncio.timeout(self.timeout_seconds):
            return await decode_request(await anext(self._messages, None))


def check_totals(beat: pb.Heartbeat, before: Sequence[int]) -> tuple[int, ...]:
    """Return the totals of a heartbeat, in the order of its fields.

    ``before`` are the totals of the session's previous heartbeat; empty for the first one. Raises InvalidRequest for
    an impossible total, or one below the previous total.
    """
    totals = tuple(getattr(beat, field.name) for field in beat.DESCRIPTOR.fields)
    for field, value, earlier in zip(beat.DESCRIPTOR.fields, totals, before or (0,) * len(totals), strict=True):
        check_max(f"the heartbeat's {field.name}", value, MAX_TOTAL)
        if value < earlier:
            raise InvalidRequest(
                f"the heartbeat's {field.name} fell from {earlier} to {value}; totals never fall within a session"
            )
    return totals
