"""Speculation benchmark at its smallest, with the built-in model as its own draft."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import speculate


def test_every_arm_answers_alike_and_is_counted(tmp_path: Path) -> None:
    out = tmp_path / "speculate.json"
    small = ["--quick", "--answer-tokens", "24", "--workloads", "edits", "--out", str(out)]
    speculate.main(["--model", "demo", "--draft-model", "demo", "--dtype", "float32", *small])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["summary"]["identical"]
    rows = {(row["workload"], row["arm"]): row for row in found["rows"]}
    assert set(rows) == {("edits", arm) for arm in ("plain", "suffix", "trees", "draft")}
    for (_, arm), row in rows.items():
        assert row["tokens_per_s"] > 0
        assert row["expected_tokens_per_s"] > 0
        assert row["identical"]
        assert row["accepted_per_pass"] >= 1
        assert arm != "plain" or row["accepted_per_pass"] == 1


def test_the_rate_of_answers_of_different_lengths_is_that_of_their_steps() -> None:
    lengths = [10, 10, 10, 160]
    answers: list[Any] = [
        SimpleNamespace(token_ids=[0] * (n + 1), ttft_ms=7.0, total_ms=7.0 + n * 20, draft_tokens=0, accepted_tokens=0)
        for n in lengths
    ]
    totals = speculate.ArmTotals()
    totals.add([speculate.BatchResult(answers, expected_seconds=160 * 0.02, branched=0)])
    assert totals.rates == [pytest.approx(sum(lengths) / (160 * 0.02))]
    assert totals.generated / totals.expected_seconds == pytest.approx(totals.rates[0])
