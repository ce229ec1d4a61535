"""The gate: a report that can fail, and what follows from its verdict."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from kvsidecar.errors import InvalidRequest

from benchmarks.node import Node
from inference_svc.api import Engine
from inference_svc.reuse.verify import BUILT_IN, Question, Thresholds, read_questions
from inference_svc.verify_command import main
from tests.inference_svc.reuse.test_approximate import documents, joined
from tests.inference_svc.test_exactness import prompt

QUESTIONS = read_questions(BUILT_IN)[:3]


def test_everything_computed_again_passes_and_coarse_thresholds_fail() -> None:
    with Engine.from_pretrained("demo", cache=None, dtype="float32", storage_bits=16) as engine:
        report = engine.verify_correctness(QUESTIONS, repair="cacheblend", ratio=1.0)
        assert report.passed
        assert report.chosen.kl_mean < 1e-6
        assert report.chosen.first_divergence == 16
        assert report.noise_kl < 1e-6
        none = next(f for f in report.findings if f.strategy == "none" and f.arm != "exact prefix")
        assert none.kl_mean > 100 * report.chosen.kl_mean
        strict = Thresholds(max_kl=none.kl_mean / 10, min_agreement=0.0)
        assert not engine.verify_correctness(QUESTIONS, repair="none", ratio=0.0, thresholds=strict).passed


def test_prompts_that_cannot_be_measured_are_refused(tmp_path: Path) -> None:
    with Engine.from_pretrained("demo", cache=None) as engine, pytest.raises(InvalidRequest, match="two documents"):
        engine.verify_correctness([Question(("one",), "what?")])
    broken = tmp_path / "prompts.jsonl"
    broken.write_text('{"documents": ["a", "b"], "question": "c"}\n{"documents": 3}\n')
    with pytest.raises(InvalidRequest, match="line 2"):
        read_questions(broken)


def test_the_verdict_switches_reuse_on_and_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker that runs already takes the verdict over, and a daemon that comes back still knows it."""
    flags = {"chunking": "document", "document_separator": "<|doc|>", "dtype": "float32"}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"documents": q.documents, "question": q.question}) + "\n" for q in QUESTIONS)
    )
    with Node(
        "demo", arena_bytes="64MiB", pool_bytes="64MiB", worker_flags=flags, daemon_flags={"heartbeat_ms": 100}
    ) as node:
        common = ["demo", "--dtype", "float32", "--bits", "16", "--prompts", str(prompts), "--store-verdict"]
        common += ["--cache-socket", str(node.cache_socket), "--json"]

        def reused(seed: int) -> int:
            time.sleep(0.5)
            a, b, c, d = documents(seed)
            node.client().warm(joined([a, b, c, d]))
            node.settle()
            return node.client().generate(joined([b, a, prompt(seed, 20)]), max_tokens=1).approximate_tokens

        def printed() -> dict[str, Any]:
            out = capsys.readouterr().out
            found: dict[str, Any] = json.loads(out[out.index("{") :])  # behind what was logged before
            return found

        assert reused(1) == 0
        assert main([*common, "--max-kl", "100", "--min-agreement", "0"]) == 0
        report = printed()
        assert report["passed"]
        assert report["chosen"]["strategy"] == "guided", "the cheapest that passes"
        assert reused(2) > 0
        node.restart_daemon()
        node.settle()
        assert reused(3) > 0
        kl = {f["strategy"]: f["kl_mean"] for f in report["findings"] if f["ratio"] > 0}
        between = (kl["guided"] + kl["guided_8"]) / 2
        assert main([*common, "--max-kl", str(between), "--min-agreement", "0"]) == 0
        assert printed()["chosen"]["strategy"] != "guided", "it does not pass any more"
        assert reused(4) > 0, "workers follow the verdict"
        assert main([*common, "--max-kl", "0", "--min-agreement", "1"]) == 1
        assert reused(5) == 0
