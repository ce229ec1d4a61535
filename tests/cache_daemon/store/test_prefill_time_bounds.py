"""Bounds of the prefill seconds that external callers claim."""

from __future__ import annotations

import pytest
from kvsidecar import keys
from kvsidecar.chunk_layout import new_header

from cache_daemon.auth.principal import OPERATOR, Principal
from cache_daemon.eviction.prefill_cost import MAX_TOKEN_SECONDS
from cache_daemon.store.prefill_time_bounds import _MAX_CLAIMS, _MAX_VOTERS, PrefillTimeBounds
from cache_daemon.store.sessions import Session
from tests.cache_daemon.conftest import GEOMETRY, descriptor

TOKENS = 16


def session_of(owner: object, model: str = "m", *, shares_memory: bool = False) -> Session:
    described = descriptor(model)
    return Session("s", keys.namespace_id(described), described, None, shares_memory, owner=owner)


def believed(claims: PrefillTimeBounds, session: Session, seconds: float) -> float:
    header = new_header(GEOMETRY, list(range(TOKENS)), 0)
    header.prefill_seconds = seconds
    return claims.clamp(session, header)


WORKER, ADMIN = session_of(OPERATOR, shares_memory=True), session_of(OPERATOR)
ALICE, BOB, CAROL = (session_of(Principal(name)) for name in ("alice", "bob", "carol"))


@pytest.mark.parametrize("trusted", [WORKER, ADMIN])
def test_a_worker_or_operator_bounds_all_callers_and_is_not_bounded_by_them(trusted: Session) -> None:
    claims = PrefillTimeBounds()
    for caller in (ALICE, BOB, CAROL):
        for _ in range(100):
            believed(claims, caller, 90.0)
    assert believed(claims, trusted, 0.5) == 0.5
    assert believed(claims, ALICE, 90.0) == pytest.approx(0.5)
    assert believed(claims, ALICE, 0.25) == 0.25, "a lower claim stands"
    assert believed(claims, trusted, 2.0) == 2.0


def test_each_namespace_has_the_bound_of_its_workers() -> None:
    claims = PrefillTimeBounds()
    for model, seconds in (("small", 0.25), ("large", 4.0)):
        believed(claims, session_of(OPERATOR, model, shares_memory=True), seconds)
    found = [believed(claims, session_of(Principal("alice"), m), 90.0) for m in ("small", "large", "invented")]
    assert found == pytest.approx([0.25, 4.0, 0.25])


def test_a_caller_has_one_vote_in_all_namespaces() -> None:
    claims = PrefillTimeBounds()
    for n in range(100):
        believed(claims, session_of(Principal("alice"), f"model-{n}"), 90.0)
    believed(claims, BOB, 0.5)
    believed(claims, CAROL, 0.25)
    assert believed(claims, ALICE, 90.0) == pytest.approx(0.5), "of 0.25, 0.5 and 90"


def test_the_only_caller_is_bounded_by_the_slowest_model() -> None:
    claims = PrefillTimeBounds()
    assert believed(claims, ALICE, 3e38) == TOKENS * MAX_TOKEN_SECONDS
    assert believed(claims, ALICE, 1.5) == 1.5


def test_an_unknown_time_stays_unknown_and_has_no_vote() -> None:
    claims = PrefillTimeBounds()
    assert believed(claims, WORKER, 0.0) == believed(claims, BOB, 0.0) == 0.0
    assert believed(claims, ALICE, 90.0) == 90.0


def test_memory_is_bounded_and_the_latest_voters_count() -> None:
    claims = PrefillTimeBounds()
    for n in range(3 * _MAX_VOTERS):
        believed(claims, session_of(Principal(f"caller-{n}")), 1.0)
        believed(claims, session_of(OPERATOR, f"model-{n}", shares_memory=True), 1.0)
    for _ in range(3 * _MAX_CLAIMS):
        believed(claims, ALICE, 1.0)
    for votes in (claims._trusted, claims._external):
        assert len(votes) == len(votes._claims) == _MAX_VOTERS
    assert len(claims._external._claims[ALICE.owner]) == _MAX_CLAIMS
