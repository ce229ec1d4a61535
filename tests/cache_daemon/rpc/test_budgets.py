"""One caller has a part, and the private socket always has its share."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from kvsidecar.errors import LimitExceeded

from cache_daemon.auth.principal import GUEST, Principal
from cache_daemon.rpc.caller_budgets import CallerLimits, LargeRequests, OpenStreams

ALICE = Principal("alice")
SHARE = CallerLimits(total=8, external=6, per_caller=4)


def test_one_caller_leaves_room_for_others_and_all_for_the_private_socket() -> None:
    streams = OpenStreams()
    with ExitStack() as held:
        for _ in range(4):
            held.enter_context(streams.one("Store", SHARE, GUEST))
        with (
            pytest.raises(LimitExceeded, match="4 open Store calls of this"),
            streams.one("Store", SHARE, GUEST),
        ):
            pass
        for _ in range(2):
            held.enter_context(streams.one("Store", SHARE, ALICE))
        with pytest.raises(LimitExceeded, match="beyond the private socket"), streams.one("Store", SHARE, ALICE):
            pass
        with streams.one("Fetch", SHARE, GUEST):
            """Another kind of call is another matter."""
        for _ in range(2):
            held.enter_context(streams.one("Store", SHARE, None))
        with pytest.raises(LimitExceeded, match="8 open Store calls"), streams.one("Store", SHARE, None):
            pass
    with streams.one("Store", SHARE, GUEST):
        """Ended calls no longer count."""


def test_large_requests_of_one_caller_have_a_budget() -> None:
    large = LargeRequests(100)
    with large.one(60, GUEST):
        with pytest.raises(LimitExceeded, match="60 bytes of this caller's large requests"), large.one(41, GUEST):
            pass
        with large.one(40, GUEST), large.one(100, ALICE):
            """Another's requests are not the caller's."""
    with large.one(100, GUEST):
        """Ended calls no longer count."""
