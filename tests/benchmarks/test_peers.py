"""Comparison benchmarks without other engines: our arms, transformers, missing engines."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks import agents, engines, peers, peers_page
from benchmarks.engines import TokenSource
from benchmarks.systems.arms import EngineArm
from benchmarks.systems.checkpoint import KINDS, folder_of, folder_of_codes, write_gguf
from benchmarks.systems.engine import Answer
from benchmarks.systems.environments import Environment
from inference_svc.models.gguf import gguf_config, gguf_file, gguf_weights

_SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreters without the engines."""
    for name in ("VLLM", "LLAMA_CPP"):
        monkeypatch.setenv(f"KVSIDECAR_BENCH_{name}", sys.executable)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.usefixtures("nothing_installed")
def test_what_is_missing_is_said_and_the_rest_measured(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    peers.main(["--quick", "--systems", "ours", "transformers", "llama.cpp_q4_0", "vllm", "--out", str(out)])
    found = read(out)
    rows = {row["system"]: row for row in found["rows"]}
    assert set(rows) == {"ours", "transformers"}
    metrics = peers.metrics_of([4])
    assert metrics[-1] == "decode_4_ms"
    assert all(rows[name][metric] > 0 for name in rows for metric in metrics)
    assert rows["ours"]["reused_after_restart"] > 900
    assert rows["transformers"]["reused_after_restart"] == 0
    assert set(found["summary"]["missing"]) == {"llama.cpp_q4_0", "vllm"}
    assert "is no interpreter with vllm" in found["summary"]["missing"]["vllm"]
    text = peers_page.page({"peers": found})
    assert "**Other systems are faster at:**" in text
    assert "Missing, vllm: " in text
    assert "| time per step, 4 answers |" in text
    assert rows["transformers"]["against"] == "ours"
    assert f"| transformers | ours | 1,024 | {rows['transformers']['ttft_nocache_ratio']:.2f} ± " in text
    engines.main(["--quick", "--out", str(out)])
    assert "is no interpreter with vllm" in read(out)["summary"]["missing"]


@pytest.mark.parametrize("name", ["ours", "transformers"])
def test_a_batch_gets_the_answers_of_its_prompts(tmp_path: Path, name: str) -> None:
    sizes = {"context_tokens": [256], "answer_tokens": 6, "repeats": 1, "batches": [3]}
    options = argparse.Namespace(model="demo", dtype="float32", eager=True, **sizes)
    draw = TokenSource(1)
    document = draw(224)
    prompts = [document + draw(32) for _ in range(3)]
    with ExitStack() as stack:
        arm = peers.Bench(options, tmp_path).start(name, stack)
        alone = [arm.ask(prompt, 6).ids for prompt in prompts]
        together = arm.ask_batch(prompts, 6)
    assert [answer.ids for answer in together] == alone
    assert all(answer.decode_ms > 0 and answer.cached >= 224 for answer in together)


@pytest.mark.usefixtures("nothing_installed")
def test_agents_reuse_what_any_of_them_has_read(tmp_path: Path) -> None:
    out = tmp_path / "agents.json"
    small = ["--quick", "--clients", "2", "--tools-words", "150", "--dtype", "float32"]
    agents.main([*small, "--arms", "nocache", "ours", "vllm_ours", "--out", str(out)])
    found = read(out)
    rows = {(row["arm"], row["step"]): row for row in found["rows"]}
    assert {step for arm, step in rows if arm == "ours"} == {*agents.KINDS, "all"}
    assert all(row["reused_ratio"] == 0 for (arm, _), row in rows.items() if arm == "nocache")
    assert found["summary"]["ours_reuse_of_ideal"] >= 0.99
    assert rows["ours", "restarted"]["reused_ratio"] >= 0.99 * rows["ours", "restarted"]["ideal_reused_ratio"]
    # Beginning, and the turns that were kept, which stand elsewhere now.
    assert 0 < rows["ours", "compacted"]["ideal_reused_ratio"] < rows["ours", "grow"]["ideal_reused_ratio"]
    assert "vllm_ours" in found["summary"]["missing"][0]


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_what_is_written_for_llama_cpp_is_the_model(tmp_path: Path, architecture: str, kind: str) -> None:
    folder = tmp_path / "model"
    if architecture == "llama":
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**_SMALL)).save_pretrained(folder)
    else:
        folder = folder_of("shape:tiny", tmp_path)
    write_gguf(folder, tmp_path / "model.gguf", kind)
    written = gguf_file.read_gguf(tmp_path / "model.gguf")
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    found = gguf_weights.weights_of(written, gguf_config.config_of(written))
    assert len(found) == len(expected) - ("lm_head.weight" in expected and architecture == "qwen2")
    for weight in found:
        values = torch.cat(list(weight.pieces(written, torch.float32))).view(weight.shape)
        error = (values - expected[weight.name]).abs().max() / expected[weight.name].abs().max().clamp_min(1e-9)
        assert error <= {"f16": 1e-3, "bf16": 0.01, "q8_0": 0.01, "q4_0": 0.15}[kind], weight.name


def test_other_engines_keep_their_wait_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KVSIDECAR_LOG_LEVEL", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "2")
    found = Environment(Path(sys.executable)).variables()
    left_out = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KVSIDECAR_LOG_LEVEL"}
    assert left_out.isdisjoint(found)
    assert found["OMP_NUM_THREADS"] == "2"


def test_a_system_that_fails_is_dropped_and_the_rest_measured() -> None:
    asked, turns = list[str](), list[str]()

    def arm(name: str, lives: int) -> EngineArm:
        def ask(prompt: list[int], answer: int) -> Answer:
            asked.append(name)
            if asked.count(name) > lives:
                raise RuntimeError(f"{name} ended")
            return Answer([1] * answer, 10.0, 10.0 + 2 * (answer - 1), 0)

        return EngineArm(name, ask, lambda prompts, answer: [ask(p, answer) for p in prompts], lambda: None)

    missing: dict[str, str] = {}
    options = argparse.Namespace(answer_tokens=4, batches=[2])
    arms = {"ours": arm("ours", 1000), "vllm": arm("vllm", 1000), "openvino": arm("openvino", 6)}
    documents = [peers.Document.draw(TokenSource(1), 64, [2]) for _ in range(3)]
    rows = peers.Comparison(arms, missing, options, pause=0).measure(64, documents, turns.append)
    assert missing == {"openvino": "openvino ended"}
    assert {row["system"]: row.get("against") for row in rows} == {"ours": None, "vllm": "ours"}
    assert rows[1]["decode_2_ms"] == 2
    assert rows[1]["decode_2_ratio"] == 1
    # The system that begins changes with the document; the failed one gets no more turns.
    assert turns[:3] == ["ours", "vllm", "openvino"]
    assert turns[3:7] == ["vllm", "ours", "ours", "vllm"]
    assert turns[7:] == ["ours", "vllm", "vllm", "ours", "ours", "vllm"]


def test_a_file_with_its_tokenizer_becomes_a_model_with_the_same_tokens(tmp_path: Path) -> None:
    folder = folder_of("shape:tiny", tmp_path)
    write_gguf(folder, tmp_path / "model.gguf", "q8_0")
    made = folder_of_codes(tmp_path / "model.gguf", tmp_path, "float32")
    assert tmp_path in made.parents
    text = "def f(x):\n    return x  # caf\u00e9 \u4f60\u597d<|im_end|>"
    expected, found = (AutoTokenizer.from_pretrained(path) for path in (folder, made))
    assert found(text)["input_ids"] == expected(text)["input_ids"]
    assert found.decode(found(text)["input_ids"]) == expected.decode(expected(text)["input_ids"])
