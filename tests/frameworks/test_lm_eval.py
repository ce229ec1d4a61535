"""lm-eval through its ``local-completions``, on a task of this folder: likelihoods of given texts, and texts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.served_node import Server

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not here; make test-frameworks runs it")
# A question, and answers of which the first is right.
QUESTIONS = [
    ("The capital of France is", [" Paris", " green", " under"]),
    ("Two plus two is", [" four", " window", " of"]),
    ("The sun is very", [" hot", " Tuesday", " because"]),
    ("A dog is an", [" animal", " yellow", " quickly"]),
]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    lines = [json.dumps({"question": q, "choices": answers, "label": 0}) for q, answers in QUESTIONS]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    common = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path}/questions.jsonl}}, cache_dir: {tmp_path}/cache}}
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
"""
    (tmp_path / "choosing.yaml").write_text(
        f"task: choosing\noutput_type: multiple_choice\n{common}doc_to_choice: choices\ndoc_to_target: label\n"
        "metric_list: [{metric: acc}]\n"
    )
    (tmp_path / "surprise.yaml").write_text(
        f'task: surprise\noutput_type: loglikelihood\n{common}doc_to_target: "{{{{choices[0]}}}}"\n'
        "metric_list: [{metric: perplexity}]\n"
    )
    (tmp_path / "writing.yaml").write_text(
        f'task: writing\noutput_type: generate_until\n{common}doc_to_target: "{{{{choices[0]}}}}"\n'
        'generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false}\n'
        "metric_list: [{metric: exact_match}]\n"
    )
    return tmp_path


def test_a_task_of_each_kind_gives_its_figure(server: Server, tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    arguments = f"model={server.model},base_url={server.url}/v1/completions,tokenizer_backend=huggingface"
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model="local-completions", model_args=f"{arguments},tokenizer={server.tokenizer},max_retries=1",
        tasks=["choosing", "surprise", "writing"], task_manager=TaskManager(include_path=str(tasks)),
        batch_size=4, bootstrap_iters=0,
    )  # fmt: skip
    results = found["results"]
    accuracy, perplexity = results["choosing"]["acc,none"], results["surprise"]["perplexity,none"]
    assert 0 <= accuracy <= 1
    assert math.isfinite(perplexity)
    if server.model == "smollm2":
        assert accuracy >= 0.75
        assert perplexity < 200
    assert 0 <= results["writing"]["exact_match,none"] <= 1
