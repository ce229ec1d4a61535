"""Pauses before restarts double up to a limit, and start again after a stable run."""

from __future__ import annotations

from kvsidecar.process.restart_backoff import RestartBackoff


def test_pauses_double_up_to_the_limit_and_start_again_after_a_stable_run() -> None:
    backoff = RestartBackoff(0.1, 0.5, 30.0)
    assert [backoff.pause(ran) for ran in (0.0, 30.0, 0.0, 0.0, 31.0, 0.0)] == [0.1, 0.2, 0.4, 0.5, 0.1, 0.2]
    immediate = RestartBackoff(0.1, 0.5, 30.0, immediate=True)
    assert [immediate.pause(ran) for ran in (0.0, 0.0, 0.0, 31.0, 0.0)] == [0.0, 0.1, 0.2, 0.0, 0.1]
