"""``kvsidecar quantize``: the folder that it writes computes what its report says, and a refusal leaves nothing."""

from __future__ import annotations

import json
import math
import shutil
import signal
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from kvsidecar.errors import ModelUnsupported
from safetensors.torch import load_file, save_file

from inference_svc.models.loader import DEMO_MODEL, load
from inference_svc.models.meta_model import build_meta_model
from inference_svc.quantize import calibration_texts, layerwise_quantizer, scale_folding
from inference_svc.quantize.quantize_command import QuantizeReport, main, quantize
from tests.inference_svc.models.test_device_weights import add_head

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 64,
}  # fmt: skip
# Queries that share a value and those that do not, tied and untied heads, biases, a window.
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "LlamaForCausalLM": (t.LlamaConfig, {"num_key_value_heads": 4, "attention_bias": True}),
    "MistralForCausalLM": (t.MistralConfig, {"sliding_window": 32}),
    "Qwen2ForCausalLM": (t.Qwen2Config, {"tie_word_embeddings": True}),
    "Qwen3ForCausalLM": (t.Qwen3Config, {"head_dim": 32, "intermediate_size": 160}),
}
TEXT = "The keeper of the lighthouse wrote down every ship that passed, its name and where it went. " * 60


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """What is computed here is too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_at(folder: Path, name: str) -> Path:
    """A random model of a family, of whose inputs a few are large."""
    kind, changes = FAMILIES[name]
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(kind(**SHAPE | changes), dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            parameter.data += torch.randn(parameter.shape).exp() * (torch.rand(parameter.shape) < 0.1) * 8
        elif parameter_name.endswith("bias"):
            parameter.data.normal_(0.0, 0.1)
        elif "proj" in parameter_name:
            parameter.data *= 5  # enough for layers to matter
    model.save_pretrained(folder)
    for file in DEMO_MODEL.glob("*token*.json"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_at(tmp_path_factory.mktemp("qwen2"), "Qwen2ForCausalLM")


def perplexity(model: Any, tokens: torch.Tensor) -> float:
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        logits = model(tokens).logits[:, :-1].flatten(0, 1)
    return math.exp(float(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_computes_what_the_report_says(name: str, tmp_path: Path, text: Path) -> None:
    source, out = model_at(tmp_path / "source", name), tmp_path / "small"
    report = quantize(str(source), out, text)
    assert sorted(scale_folding.FAMILIES) == sorted(FAMILIES)
    assert report.group_size == (32 if name == "Qwen3ForCausalLM" else 64)
    before, after = (load(str(p), device="cpu", dtype="float32", weights=16) for p in (source, out))
    assert type(after.model).__name__ == name
    length = 32 if name == "MistralForCausalLM" else 64
    measured = calibration_texts.of_file(text, before.tokenizer, length).evaluation
    assert perplexity(after.model, measured) == pytest.approx(report.measured.awq_perplexity, rel=1e-4)
    assert perplexity(before.model, measured) == pytest.approx(report.measured.perplexity, rel=2e-3)
    assert report.measured.awq_error < 0.7 * report.measured.plain_error
    assert load(str(out), device="cpu").weights != before.weights


def test_the_folder_is_whole(qwen2: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "small"
    assert main([str(qwen2), "--out", str(out), "--text", str(text), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads((out / "quantized.json").read_text())
    assert said["quantized_size_bytes"] < said["size_bytes"]
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True,
        "modules_to_not_convert": None,
    }  # fmt: skip
    assert config["dtype"] == "float16"
    original = {f.name for f in qwen2.iterdir()}
    assert {f.name for f in out.iterdir()} == original | {"quantized.json"}
    tensors = load_file(out / "model.safetensors")
    assert {str(x.dtype) for x in tensors.values()} == {"torch.float16", "torch.int32"}
    assert tensors["model.layers.1.mlp.down_proj.qweight"].shape == (128, 8)
    assert [f.name for f in tmp_path.iterdir()] == ["small"]


def test_a_head_of_its_own_is_written(qwen2: Path, tmp_path: Path, text: Path) -> None:
    folder, out = Path(shutil.copytree(qwen2, tmp_path / "source")), tmp_path / "small"
    add_head(folder)
    report = quantize(str(folder), out, text)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], head.half())
    after = load(str(out), device="cpu", dtype="float32", weights=16)
    measured = calibration_texts.of_file(text, after.tokenizer, 64).evaluation
    assert perplexity(after.model, measured) == pytest.approx(report.measured.awq_perplexity, rel=1e-4)


def test_a_second_run_writes_the_same(qwen2: Path, tmp_path: Path, text: Path) -> None:
    for name in ("one", "two"):
        quantize(str(qwen2), tmp_path / name, text)
    one, two = (tmp_path / name / "model.safetensors" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_one_layer_is_in_memory_at_a_time(qwen2: Path, tmp_path: Path, text: Path, monkeypatch: Any) -> None:
    held = []

    def watched(layer: Any, states: Any, rotary: Any, inner: Any = layerwise_quantizer._collect_inputs) -> Any:
        held.append(sum(not p.is_meta for one in work.layers for p in one.parameters()))
        return inner(layer, states, rotary)

    def made(*given: Any) -> layerwise_quantizer.LayerwiseQuantizer:
        nonlocal work
        work = layerwise_quantizer.LayerwiseQuantizer(*given)
        return work

    work: Any = None
    monkeypatch.setattr(layerwise_quantizer, "_collect_inputs", watched)
    monkeypatch.setattr("inference_svc.quantize.quantize_command.LayerwiseQuantizer", made)
    quantize(str(qwen2), tmp_path / "small", text)
    assert held == [len(list(work.layers[0].parameters()))] * SHAPE["num_hidden_layers"]


@pytest.fixture
def refused(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command, which must refuse in one line and leave nothing; returns the line."""

    def run(model: Path | str, out: Path | None = None, read: Path = text) -> str:
        target = out or tmp_path / "made" / "small"
        target.parent.mkdir(exist_ok=True)
        before = sorted(target.parent.iterdir())
        assert main([str(model), "--out", str(target), "--text", str(read)]) == 2
        assert sorted(target.parent.iterdir()) == before
        said = capsys.readouterr().err
        assert said.startswith("kvsidecar quantize: ")
        assert said.count("\n") == 1
        return said

    return run


def changed(source: Path, target: Path, **settings: Any) -> Path:
    folder = shutil.copytree(source, target)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


def test_models_that_cannot_be_quantized_are_refused_by_name(qwen2: Path, tmp_path: Path, refused: Any) -> None:
    awq = {"quant_method": "awq", "bits": 4}
    assert "quantized already (awq)" in refused(changed(qwen2, tmp_path / "a", quantization_config=awq))
    said = refused(changed(qwen2, tmp_path / "b", architectures=["Phi3ForCausalLM"]))
    assert f"Phi3ForCausalLM cannot be quantized; allowed are {', '.join(scale_folding.FAMILIES)}" in said
    assert "random weights" in refused("shape:tiny")
    assert "neither 'demo'" in refused("no-such-model")
    said = refused(changed(qwen2, tmp_path / "c", intermediate_size=72))
    assert "mlp.down_proj is 72 x 64; the format takes inputs in multiples of 32" in said


@pytest.mark.parametrize("fault", ["nan", "large", "missing", "truncated"])
def test_damaged_weights_are_refused_by_name(fault: str, qwen2: Path, tmp_path: Path, refused: Any) -> None:
    folder = shutil.copytree(qwen2, tmp_path / "model")
    file, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    if fault == "missing":
        del tensors[name]
    elif fault != "truncated":
        tensors[name][3, 4] = {"nan": torch.nan, "large": 1e30}[fault]
    save_file(tensors, file, {"format": "pt"})
    if fault == "truncated":
        file.write_bytes(file.read_bytes()[:-1000])
    assert {"nan": name, "large": "model.layers.1.", "missing": name, "truncated": str(file)}[fault] in refused(folder)


def test_weights_of_8_bits_without_a_quantization_config_are_refused(qwen2: Path, tmp_path: Path, refused: Any) -> None:
    folder = shutil.copytree(qwen2, tmp_path / "model")
    file, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, file, {"format": "pt"})
    assert f"{name} is F8_E4M3 in {folder}" in refused(folder)


def test_files_that_cannot_be_read_are_named(qwen2: Path, tmp_path: Path, refused: Any) -> None:
    folder = changed(qwen2, tmp_path / "config", rms_norm_eps="x")
    assert f"cannot read {folder / 'config.json'}: " in refused(folder)
    folder = shutil.copytree(qwen2, tmp_path / "tokenizer")
    (folder / "tokenizer.json").write_text("{}")
    assert f"cannot load the tokenizer in {folder}: " in refused(folder)


def test_a_place_that_cannot_be_written_to_is_refused(qwen2: Path, tmp_path: Path, refused: Any) -> None:
    (tmp_path / "there").mkdir()
    assert "is there already" in refused(qwen2, tmp_path / "there")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "is there already" in refused(qwen2, tmp_path / "link")
    assert main([str(qwen2), "--out", str(tmp_path / "no" / "folder")]) == 2


def test_too_little_room_is_refused(qwen2: Path, refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(1 << 20))
    assert "has 1.0 MiB left" in refused(qwen2)
    monkeypatch.undo()
    monkeypatch.setattr(layerwise_quantizer, "free_bytes", lambda: 1 << 20)
    assert "and 1.0 MiB are free" in refused(qwen2)


def test_a_text_that_is_none_is_refused(qwen2: Path, tmp_path: Path, refused: Any) -> None:
    file = tmp_path / "text"
    assert f"cannot read {file}" in refused(qwen2, read=file)
    file.write_bytes(b"\xff\xfe bytes " * 100)
    assert "is not UTF-8 text" in refused(qwen2, read=file)
    file.write_text("Some words.")
    assert "allowed are 128 and more" in refused(qwen2, read=file)
    assert "cannot read" in refused(qwen2, read=tmp_path)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_an_interrupted_run_leaves_nothing(
    number: int, raised: type[BaseException], qwen2: Path, tmp_path: Path, text: Path, monkeypatch: Any
) -> None:
    def interrupted(*_: Any) -> None:
        assert list(tmp_path.iterdir()) != []
        signal.raise_signal(number)

    monkeypatch.setattr(scale_folding, "round_plainly", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
    try:
        with pytest.raises(raised):
            main([str(qwen2), "--out", str(tmp_path / "small"), "--text", str(text)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(tmp_path.iterdir()) == []


def test_a_long_text_is_read_from_its_beginning_and_measured_apart(tmp_path: Path, monkeypatch: Any) -> None:
    tokenizer = load("demo").tokenizer
    file = tmp_path / "text"
    file.write_text("ä" * 3000, encoding="utf-8")
    monkeypatch.setattr(calibration_texts, "_MAX_FILE_BYTES", 2001)  # in the middle of a letter
    found = calibration_texts.of_file(file, tokenizer, 16)
    assert 0 < len(found.evaluation) < len(found.calibration)
    shipped = calibration_texts.built_in(tokenizer, 64)
    assert (len(shipped.calibration), len(shipped.evaluation)) == (32, 12)
    read = {tuple(row) for row in shipped.calibration.tolist()}
    assert not read & {tuple(row) for row in shipped.evaluation.tolist()}


def test_scales_are_folded_so_that_nothing_changes_but_the_rounding(qwen2: Path, monkeypatch: Any) -> None:
    """With rounding that rounds nothing, a layer with folded scales computes what it computed before."""

    class Exact:
        def __init__(self, weight: torch.Tensor, *_: Any) -> None:
            self._weight = weight

        def dense(self) -> torch.Tensor:
            return self._weight

    monkeypatch.setattr(scale_folding, "quantize_weight", Exact)
    layer = load(str(qwen2), device="cpu", dtype="float32").model.model.layers[0]
    layer.self_attn.config._attn_implementation = "sdpa"
    norm = layer.input_layernorm.weight.clone()
    config = t.AutoConfig.from_pretrained(qwen2)
    rotary = build_meta_model(config, torch.float32, "sdpa").model.rotary_emb
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(1)) * 3
    turned = rotary(x, torch.arange(40)[None])
    with torch.inference_mode():
        states = [x]
        seen = layerwise_quantizer._collect_inputs(layer, states, turned)
        done = scale_folding.quantize_layer(layer, seen, 64)
        again = [x]
        layerwise_quantizer._forward(layer, again, turned)
    assert not torch.equal(layer.input_layernorm.weight, norm)
    assert (again[0] - states[0]).norm() < 1e-3 * states[0].norm()
    assert done.error < 1e-6
    with pytest.raises(ModelUnsupported):
        scale_folding.check_quantizable("Gemma2ForCausalLM", config)


def test_the_report_is_short(qwen2: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "small"
    assert main([str(qwen2), "--out", str(out), "--text", str(text)]) == 0
    said = capsys.readouterr().out
    for wanted in ("weights", "perplexity", "plainly rounded", "groups of 64", f"kvsidecar serve --model {out}"):
        assert wanted in said
    assert len(said.splitlines()) < 10
    assert all(name in QuantizeReport.__annotations__ for name in ("seconds", "measured"))
