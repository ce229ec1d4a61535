"""Benchmark of the host's time in a step at its smallest."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import step_overhead


def test_decode_steps_of_all_sequences_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "step_overhead.json"
    step_overhead.main(["--quick", "--out", str(out)])
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert row["sequences"] == 4
    assert row["steps"] > 20
    assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
