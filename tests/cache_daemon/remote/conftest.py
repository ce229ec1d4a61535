"""Nodes of this process, on machines that do other things, too."""

from __future__ import annotations

import pytest

from cache_daemon.remote import fetch


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up that a busy machine keeps waiting is no miss; what computing costs ends it all the same."""
    monkeypatch.setattr(fetch, "_LOOKUP_SECONDS", 10.0)
    monkeypatch.setattr(fetch, "_LOOKUP_MAX_SECONDS", 10.0)
