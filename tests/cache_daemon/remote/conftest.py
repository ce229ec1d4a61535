"""Settings for nodes in this process, on a machine that is busy with other work."""

from __future__ import annotations

import pytest

from cache_daemon.remote import fetch_or_compute


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the lookup timeout, so that a busy machine causes no misses. The prefill cost still limits a lookup."""
    monkeypatch.setattr(fetch_or_compute, "_LOOKUP_SECONDS", 10.0)
    monkeypatch.setattr(fetch_or_compute, "_LOOKUP_MAX_SECONDS", 10.0)
