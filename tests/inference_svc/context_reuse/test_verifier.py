"""The gate: a report that can fail, and what follows from its verdict."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from kvsidecar.errors import InvalidRequest

from benchmarks.node import Node
from inference_svc.context_reuse.question import BUILT_IN, Question, read_questions
from inference_svc.context_reuse.selectors import AUTO_SELECTORS
from inference_svc.context_reuse.verifier import (
    EXACT,
    Candidate,
    Finding,
    Report,
    Thresholds,
    Verifier,
    _Divergence,
    failure_reason,
)
from inference_svc.server.python_api import Engine
from inference_svc.server.verify_command import main
from tests.inference_svc.context_reuse.test_approximate import documents, joined
from tests.inference_svc.engine.test_exactness import prompt

QUESTIONS = read_questions(BUILT_IN)[:3]


def test_everything_computed_again_passes_and_coarse_thresholds_fail() -> None:
    with Engine.from_pretrained("demo", cache=None, dtype="float32", storage_bits=16) as engine:
        limits = Thresholds(max_kl=0.001, min_prompts=3)
        report = engine.verify_correctness(QUESTIONS, repair="cacheblend", ratio=1.0, thresholds=limits)
        assert report.passed
        assert report.chosen.kl_mean < 1e-6
        assert report.chosen.control_kl < 1e-6
        assert report.chosen.first_divergence == 16
        assert report.chosen.cost == pytest.approx(1.0)
        assert report.noise_kl < 1e-6
        none = next(f for f in report.findings if f.strategy == "none" and f.arm != EXACT)
        assert none.kl_mean > 100 * report.chosen.kl_mean
        strict = Thresholds(max_kl=none.kl_mean / 10, min_agreement=0.0, min_prompts=3)
        assert not engine.verify_correctness(QUESTIONS, repair="none", ratio=0.0, thresholds=strict).passed


def finding(strategy: str, kl: float, agreement: float = 1.0, control: float = 0.0, **more: float) -> Finding:
    return Finding(
        arm=strategy, bits=16, strategy=strategy, ratio=0.15, kl_mean=kl, kl_p99=kl, top1_agreement=agreement,
        first_divergence=16, control_kl=control, cost=more.get("cost", 0.3),
    )  # fmt: skip


def report_of(repair: Finding, none: Finding, prompts: int = 12) -> Report:
    limits = Thresholds()
    exact, none, repair = (
        replace(f, arm=f.arm if i else EXACT, why=failure_reason(f, none, limits))
        for i, f in enumerate((finding("none", 0.0), none, repair))
    )
    return Report("a model", prompts, 0.0, (exact, repair, none), repair, limits)


def test_an_agreement_at_the_limit_is_not_given_up() -> None:
    """0.95 of 20 is 19, whatever 1 - 0.95 is in binary."""
    found = seen(0.0)
    found.same[0] = False
    assert not found.must_fail(Thresholds(), 20)
    found.same.append(False)
    assert found.must_fail(Thresholds(), 20)


def seen(kl: float) -> _Divergence:
    found = _Divergence()
    found.same, found.kl = [True] * 10, [kl] * 10
    return found


def test_what_is_compared_is_measured_until_it_is_decided() -> None:
    """Also where the repair itself has failed; and none of it as long as something is judged beside it."""
    verifier, repair, none, other = Verifier(cast(Any, None), 16), *(Candidate(n, 0.15) for n in ("a", "none", "b"))
    lost, open_ = 100.0, 0.0
    for kl, going in (
        ((open_, lost, lost), {repair, none}),
        ((lost, lost, open_), {other, none}),
        ((lost, open_, lost), {none}),
        ((lost, lost, lost), set()),
    ):
        arms = {c: seen(of) for c, of in zip((repair, none, other), kl, strict=True)}
        assert set(verifier._undecided_arms(arms, none, 30)) == going


def test_an_agreement_near_the_limit_does_not_pass() -> None:
    """A share of few tokens may be above the limit by chance. 0.95 of 400 tokens has a standard error of 0.011."""
    near, none = finding("salient", 0.01, 0.955), finding("none", 0.2)
    assert "standard error of 0.011" in failure_reason(replace(near, compared=400), none, Thresholds())
    assert not failure_reason(replace(near, compared=4000), none, Thresholds())
    assert not failure_reason(replace(near, compared=40), none, Thresholds(min_agreement=0.0))


LOSES = finding("none", 0.2, 0.8)


@pytest.mark.parametrize(
    ("report", "outcome", "said"),
    [
        (report_of(finding("guided", 0.01), LOSES), "passed", "is text that was read in another context, repaired by"),
        (report_of(finding("guided", 0.06), LOSES), "failed", "not reused: no repair passed, .* KL 0.06 is more"),
        (report_of(finding("guided", 0.01, 0.9), LOSES), "failed", "agreement 0.9 is less than 0.95"),
        (
            report_of(finding("guided", 0.01, control=0.05), LOSES),
            "failed",
            "harms controls: KL 0.05, without",
        ),
        (
            report_of(finding("guided", 0.01), finding("none", 0.02)),
            "inconclusive",
            "without any repair passes as well",
        ),
        (report_of(finding("guided", 0.01), LOSES, prompts=7), "inconclusive", "7 prompts are too few, at least 8"),
    ],
)
def test_the_report_says_what_will_be_reused_and_why_not(report: Report, outcome: str, said: str) -> None:
    assert report.outcome == outcome
    assert report.verdict().passed == (outcome == "passed"), "what is inconclusive is not stored as passed"
    assert re.search(said, report.sentence)


def test_a_verdict_says_on_how_many_prompts_it_stands() -> None:
    failed = report_of(replace(finding("guided", 0.06), prompts=3), LOSES)
    assert failed.verdict().prompts == 3
    assert re.search("after 3 of them", failed.sentence)


WRONG = [
    b'{"documents": ["caf\xe9", "b"], "question": "c"}',
    b'{"documents": "one text", "question": "c"}',
    b'{"documents": ["a", 1], "question": "c"}',
    b'{"documents": ["a", " "], "question": "c"}',
    b'{"documents": ["a", "b"], "question": 5}',
    b'["a", "b"]',
]


def test_prompts_that_cannot_be_measured_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Engine.from_pretrained("demo", cache=None) as engine, pytest.raises(InvalidRequest, match="two documents"):
        engine.verify_correctness([Question(("one",), "what?")])
    broken = tmp_path / "prompts.jsonl"
    broken.write_text('{"documents": ["a", "b"], "question": "c"}\n{"documents": 3}\n')
    with pytest.raises(InvalidRequest, match="line 2"):
        read_questions(broken)
    for line in WRONG:
        broken.write_bytes(line)
        assert main(["demo", "--no-store", "--prompts", str(broken)]) == 2
        said = capsys.readouterr().err
        assert f"kvsidecar verify: line 1 of {broken} " in said
        assert "Traceback" not in said
    broken.write_text('{"documents": ["a\u2028", "b"], "question": "c"}\n', encoding="utf-8")
    assert read_questions(broken) == [Question(("a\u2028", "b"), "c")], "a line ends at a newline alone"


def test_short_documents_and_long_prompts_are_measured() -> None:
    """A quote of a short document has fewer tokens than a control compares. The pool is as large as the prompts."""
    short = Question(("Paris is in France.", "Rome is in Italy."), "Where is Rome?")
    long = Question((" ".join(f"The number {i} is {i * 7}." for i in range(280)), "It rains."), "What is 7 times 3?")
    with Engine.from_pretrained("demo", cache=None, repair="none") as engine:
        lenient = Thresholds(max_kl=1e9, min_agreement=0.0)  # no arm fails before the last prompt
        report = engine.verify_correctness([short, long], thresholds=lenient, store=False)
        assert report.outcome == "inconclusive", "two prompts are too few"
        assert report.findings[0].prompts == 2
        endless = Question(("a b c d " * 4096, "x"), "y")
        with pytest.raises(InvalidRequest, match=r"^prompt 2 has \d+ tokens with its answer; the model's context"):
            engine.verify_correctness([short, endless], store=False)


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
        common = ["demo", "--dtype", "float32", "--bits", "16", "--prompts", str(prompts)]
        common += ["--cache-socket", str(node.cache_socket), "--json", "--min-agreement", "0", "--max-harm", "100"]
        few = ["--min-prompts", str(len(QUESTIONS))]

        def reused(seed: int) -> int:
            a, b, c, d = documents(seed)
            node.client().warm(joined([a, b, c, d]))
            node.settle()
            ids = joined([b, a, prompt(seed, 20)])
            return node.client().generate(ids, max_tokens=1, reuse_anywhere=True).approximate_tokens

        def follows(reuse: bool, seed: int) -> bool:
            """Whether the worker comes to reuse, or not to, by what its next heartbeats tell it."""
            deadline = time.monotonic() + 30
            while bool(reused(seed)) is not reuse:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.1)
                seed += 1
            return True

        def printed() -> dict[str, Any]:
            out = capsys.readouterr().out
            found: dict[str, Any] = json.loads(out[out.index("{") :])  # behind what was logged before
            return found

        assert reused(1) == 0
        assert main([*common, "--max-kl", "100"]) == 3
        inconclusive = printed()
        assert "too few" in inconclusive["sentence"]
        time.sleep(0.5)  # some heartbeats
        assert reused(2) == 0, "inconclusive is not passed"
        assert main([*common, *few, "--max-kl", "0"]) == 1
        failed = printed()
        assert failed["chosen"]["prompts"] == 1, "what has failed is not measured any further"
        assert "after 1 of them" in failed["sentence"]
        findings = inconclusive["findings"]
        assert all(f["prompts"] == len(QUESTIONS) for f in findings)
        kl = {(f["strategy"], f["ratio"]): f["kl_mean"] for f in findings if f["arm"] != EXACT}
        best, none = min(v for (name, _), v in kl.items() if name in AUTO_SELECTORS), kl["none", 0.0]
        assert main([*common, *few, "--max-kl", str((best + none) / 2)]) == 0
        report = printed()
        chosen = report["chosen"]
        cheaper = [f for f in report["findings"] if f["passed"] and f["strategy"] in AUTO_SELECTORS]
        assert chosen["cost"] == pytest.approx(min(f["cost"] for f in cheaper), abs=0.01), "the cheapest that passes"
        assert follows(True, 100)
        node.restart_daemon()
        node.settle()
        assert follows(True, 500)
        assert main([*common, *few, "--max-kl", "0"]) == 1
        assert follows(False, 1000), "workers follow the verdict"


# Whether a first line came before anything was imported that takes time.
_FIRST_LINE = """
import os, sys
from inference_svc.server.verify_command import main
class First:
    def write(self, text):
        os.write(1, f"{'torch' in sys.modules} {text}".encode())
        os._exit(0)
    def flush(self): pass
sys.stderr = First()
main(["demo"])
"""


def test_a_redirected_verify_says_at_once_what_it_does() -> None:
    """It printed nothing for half a minute."""
    done = subprocess.run([sys.executable, "-c", _FIRST_LINE], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.startswith("False kvsidecar verify: loads demo, compares answers over reordered documents")
    assert "half a minute for 135 million parameters" in done.stdout
