"""The benchmarks that run vLLM, at their small size, for what they find beside times: ``make test-vllm``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine_faults, engines

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def summary(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["summary"]
    return found


def test_a_chat_that_moves_to_the_restarted_engine_loses_nothing(tmp_path: Path) -> None:
    """And answers are those of vLLM without a connector, cold and after a restart, wherever it is sure of them."""
    out = tmp_path / "engines.json"
    engines.main(["--quick", "--parts", "chat", "answers", "--dtype", "float32", "--out", str(out)])
    found = summary(out)
    assert found["chat_reuse_of_ideal"] >= 0.99
    assert found["chat_identical"]
    assert found["answers_plain_is_sure_of"] >= found["answers"] // 2
    assert found["answers_different_where_sure"] == 0
    assert found["answers_reused_ratio"] > 0.4


def test_kills_of_engines_and_daemon_under_load_cost_no_answer(tmp_path: Path) -> None:
    out = tmp_path / "faults.json"
    engine_faults.main(["--quick", "--out", str(out)])
    found = summary(out)
    for name in ("wrong_answers", "hung_requests", "failed_requests", "leaked"):
        assert found[name] == 0, (name, found["reasons"])
    assert found["answered"] > 50
    assert found["reused_tokens"] > 0
