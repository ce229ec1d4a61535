"""Benchmarks that run in seconds, through ``benchmarks.all``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from kvkernels.cpu.cpu_attention import serves
from kvkernels.cpu.cpu_features import native_bfloat16

from benchmarks import all as everything


@pytest.mark.timeout(500)
def test_kernels_are_measured_on_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "NAMES", ("cpu_kernels",))
    monkeypatch.setattr(sys, "argv", ["all", "--quick", "--out-dir", str(tmp_path)])
    everything.main()
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("*.json")}
    assert set(found) == {"cpu_kernels"}
    dtype = torch.bfloat16 if native_bfloat16() else torch.float32
    summary = found["cpu_kernels"]["summary"]
    assert summary["measured"] == serves(dtype, 64)
    assert summary.get("dtype") == (str(dtype) if summary["measured"] else None)
    for row in found["cpu_kernels"]["rows"]:
        assert row["max_rel_error"] < 0.02, row
