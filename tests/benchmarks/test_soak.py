"""Thinned samples of an hour."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import soak
from benchmarks.soak import thin_samples

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "soak.json"


def test_a_row_stands_for_several_samples_and_hides_no_peak() -> None:
    rows = [{"at_s": float(i), "daemon_rss_mb": i % 7, "matches": 1, "chunks": 100 - i} for i in range(10)]
    found = thin_samples(rows, most=4)
    assert [row["at_s"] for row in found] == [2.0, 5.0, 8.0, 9.0]
    assert [row["daemon_rss_mb"] for row in found] == [2, 5, 6, 2]
    assert sum(row["matches"] for row in found) == 10
    assert [row["chunks"] for row in found] == [98, 95, 92, 91]
    assert thin_samples(rows[:4], most=4) == rows[:4]
    assert thin_samples([]) == []


def test_a_client_that_is_refused_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = threading.Event()

    def refuse(_: object) -> None:
        refused.set()
        raise OSError("refused")

    monkeypatch.setattr(soak, "Peer", refuse)
    worker = soak.Worker(SimpleNamespace(), 1, 1)  # type: ignore[arg-type]
    assert refused.wait(30)
    worker.close()
    assert worker.errors[0] == "refused"


def test_a_client_whose_thread_ends_counts_as_failed_and_closes_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()
    monkeypatch.setattr(soak, "Peer", lambda _: SimpleNamespace(close=closed.set))
    monkeypatch.setattr(soak.Worker, "_work", lambda *_: [][0])
    worker = soak.Worker(SimpleNamespace(), 1, 1)  # type: ignore[arg-type]
    assert closed.wait(30)
    worker.close()
    assert worker.errors == ["a client's thread ended: IndexError('list index out of range')"]


def test_the_published_rows_add_up_to_the_summary() -> None:
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    # The last sample's matches come when the load has ended, so the summary may have some more.
    assert sum(row["matches"] for row in result["rows"]) <= result["summary"]["matches"]
