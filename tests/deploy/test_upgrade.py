"""Upgrade from the previous release and rollback, process by process, under traffic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cache_daemon.durable.scrub import scrub
from tests.deploy.releases import PROMPTS, MixedNode, Release, Traffic, previous_release

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]
THIS = Release("this")
# A gateway of 0.1.0 passes this on when a worker of 0.1.0 gets a call in the moment in which it shuts down.
DROPPED_BY_PREVIOUS = "CANCELLED: CANCELLED"
DAEMON_FIRST = ("daemon", "worker-0", "worker-1", "gateway")


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return previous_release(tmp_path_factory.mktemp("previous") / "release")


@pytest.fixture
def node(tmp_path: Path, previous: Release) -> Iterator[MixedNode]:
    found = MixedNode(tmp_path / "node", previous)
    yield found
    found.end()


@pytest.mark.parametrize("order", [DAEMON_FIRST, DAEMON_FIRST[::-1]], ids=["daemon first", "gateway first"])
def test_no_request_fails_from_the_previous_release_to_this_one_and_back(
    node: MixedNode, previous: Release, order: tuple[str, ...]
) -> None:
    with Traffic().on(node) as traffic:
        for prompt in PROMPTS:
            node.ask(prompt)
        for release, processes in ((THIS, order), (previous, order[::-1])):
            for process in processes:
                answered, failed = traffic.answers, len(traffic.failures)
                node.replace(process, release)
                if order is DAEMON_FIRST and release is THIS and process.startswith("worker"):
                    traffic.failures[failed:] = [f for f in traffic.failures[failed:] if DROPPED_BY_PREVIOUS not in f]
                assert traffic.answers > answered, f"no traffic while {process} was replaced"
            assert min(node.ask(prompt)[1] for prompt in PROMPTS) > 100, "every prompt is cached"
    assert not traffic.failures, (traffic.failures[:5], node.log())
    assert traffic.answers > 50
    node.end()
    found = scrub(node.store, repair=False)
    assert found.is_clean, found
    assert found.sound >= len(PROMPTS)
