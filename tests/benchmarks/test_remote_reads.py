"""Benchmark of a remote worker at its smallest size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import remote_reads


def test_it_moves_what_it_says_and_leaves_nothing_behind(tmp_path: Path) -> None:
    out = tmp_path / "remote.json"
    remote_reads.main(["--gbit", "0", "--mebibytes", "8", "--repeats", "1", "--out", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [row["arm"] for row in found["rows"]] == list(remote_reads.ARMS)
    rates = {row["arm"]: row["megabytes_per_second"] for row in found["rows"]}
    for arm in ("read", "write"):
        assert found["summary"][f"{arm}_over_iperf3_0gbit"] == pytest.approx(rates[arm] / rates["iperf3"], rel=0.02)
