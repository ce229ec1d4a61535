"""Layer streaming benchmark at its smallest, with a model that would fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import streaming
from benchmarks.memory_limit import MemoryLimit, MemoryLimitUnavailable
from inference_svc.models.layer_streaming.layer_file import WEIGHTS


@pytest.mark.long
def test_every_mode_answers_alike_with_guesses_and_without(tmp_path: Path) -> None:
    try:
        with MemoryLimit(1 << 30):
            pass
    except MemoryLimitUnavailable as error:
        pytest.skip(str(error))
    out = tmp_path / "streaming.json"
    small = ["--limit-bytes", "768MiB", "--answer-tokens", "8", "--sequences", "2", "--disk-bytes", "1MiB"]
    streaming.main(["--model", "shape:tiny", *small, "--folder", str(tmp_path), "--out", str(out)])
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["summary"]["identical"]
    modes = ("full_resident", "full_stream", "ffn_only_stream")
    rows = {(row["mode"], row["speculation"]): row for row in found["rows"]}
    assert set(rows) >= {(mode, speculation) for mode in modes for speculation in ("off", "ngram")}
    for (mode, speculation), row in rows.items():
        assert row["tokens_per_s"] > 0
        assert row["peak_bytes"] > 0
        assert (row["bound_tokens_per_s"] > 0) == (mode != "full_resident")
        assert row["accepted_per_pass"] >= 1
        assert speculation == "ngram" or row["accepted_per_pass"] == 1
    assert found["summary"]["model_bytes"] == sum(f.stat().st_size for f in tmp_path.rglob(WEIGHTS))
