"""Folders whose files are incomplete or damaged are refused in one sentence."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from kvsidecar.errors import ModelUnsupported
from safetensors.torch import load_file, save_file

from inference_svc.models import loader, prepare_command
from inference_svc.models.layer_streaming.residency_plan import StreamingOptions
from inference_svc.models.model_check import check_model
from inference_svc.models.model_resolver import DEMO_MODEL
from inference_svc.models.tensor_parallel.rank_group import RankGroup
from tests.inference_svc.models.test_device_weights import saved
from tests.inference_svc.tensor_parallel.rank_threads import on_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the built-in model."""
    return Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_missing_weight_is_named(folder: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers gave a missing weight random numbers, different ones at each start. The meta device is the GPU."""
    monkeypatch.setattr(loader, "pick_device", lambda _: torch.device(device))
    weights = load_file(folder / "model.safetensors")
    for missing in ("model.layers.3.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight"):
        del weights[missing]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    said = f"the files in {folder} have no model.layers.0.input_layernorm.weight, which the model needs"
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(said)}$"):
        loader.load(str(folder))


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    """transformers made an empty tokenizer: every prompt had zero tokens."""
    (folder / "tokenizer.json").unlink()
    wanted = "tokenizer.json, *.model, vocab.*, *.tiktoken, tekken.json"
    said = f"{folder} has no tokenizer: no {wanted}; download the model again"
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(said)}$"):
        check_model(str(folder), strict=True)
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(said)}$"):
        loader.load(str(folder))


def settings(**changes: Any) -> str:
    return json.dumps(json.loads((DEMO_MODEL / "config.json").read_text()) | changes)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("config.json", "{", "cannot read FILE: Expecting property name"),
        ("config.json", "[]", "cannot read FILE: it is not a JSON object"),
        ("config.json", settings(num_hidden_layers="x"), "num_hidden_layers is 'x' in FILE; allowed are positive"),
        ("config.json", settings(num_attention_heads=0), "num_attention_heads is 0 in FILE; allowed are positive"),
        ("config.json", settings(hidden_size=True), "hidden_size is True in FILE; allowed are positive"),
        (
            "config.json",
            settings(pad_token_id=1 << 20),
            "pad_token_id is 1048576 in FILE; allowed are 0 to 4095, by its",
        ),
        ("tokenizer_config.json", "[]", "cannot read FILE: it is not a JSON object"),
        ("generation_config.json", '{"eos', "cannot read FILE: Unterminated string"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id is 'x' in FILE; allowed are"),
        ("generation_config.json", '{"eos_token_id": [2, "x"]}', r"eos_token_id is \[2, 'x'\] in FILE; allowed are"),
    ],
)
def test_a_damaged_setting_is_named_before_torch_is_imported(folder: Path, file: str, text: str, said: str) -> None:
    (folder / file).write_text(text)
    said = said.replace("FILE", re.escape(str(folder / file)))
    with pytest.raises(ModelUnsupported, match=f"^{said}"):
        check_model(str(folder), strict=True)
    with pytest.raises(ModelUnsupported, match=f"^{said}"):
        loader.load(str(folder))


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("config.json", settings(rms_norm_eps="x"), "cannot read FILE: "),
        ("tokenizer.json", "{}", "cannot load the tokenizer in FOLDER: "),
        ("tokenizer.json", '{"added_tokens": [], "model": 1}', "cannot load the tokenizer in FOLDER: "),
    ],
)
def test_files_that_only_transformers_understands_are_named(folder: Path, file: str, text: str, said: str) -> None:
    (folder / file).write_text(text)
    said = said.replace("FILE", re.escape(str(folder / file))).replace("FOLDER", re.escape(str(folder)))
    with pytest.raises(ModelUnsupported, match=f"^{said}"):
        loader.load(str(folder))


def test_prepare_names_them_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text(settings(rms_norm_eps="x"))
    assert prepare_command.main([str(folder)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"kvsidecar: cannot read {folder / 'config.json'}: ")
    assert said.count("\n") == 1


def test_bytes_after_the_weights_are_damage(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as data:
        data.write(b"more")
    with pytest.raises(ModelUnsupported, match=re.escape(str(folder))):
        loader.load(str(folder))


@pytest.fixture(params=[("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2), ("I8", torch.int8)])
def unmarked(request: pytest.FixtureRequest, folder: Path) -> tuple[Path, str]:
    """A copy with one quantized weight, of which config.json says nothing, and the sentence that refuses it."""
    dtype, quantized = request.param
    name = "model.layers.1.self_attn.q_proj.weight"
    weights = load_file(folder / "model.safetensors")
    scale = weights[name].float().abs().max() / 100
    changed = {name: (weights[name].float() / scale).to(quantized), f"{name}_scale": scale}
    save_file(weights | changed, folder / "model.safetensors", {"format": "pt"})
    return folder, (
        f"{name} is {dtype} in {folder}, whose config.json has no quantization_config; allowed are F32, BF16, F16, F64:"
        " use a checkpoint that is not quantized"
    )


def test_quantized_weights_without_a_quantization_config_are_refused(
    unmarked: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their scales were ignored, so that the model wrote nonsense. The meta device is the GPU."""
    folder, said = unmarked
    name = str(folder)
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(said)}$"):
        loader.load(name, device="cpu")
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(said)}$"):
        loader.load(name, device="cpu", stream=StreamingOptions("full_stream"))
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(said)}$"):
        on_ranks(2, tmp_path, lambda group: loader.load(name, device="cpu", ranks=group))
    monkeypatch.setattr(loader, "pick_device", lambda _: torch.device("meta"))
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(said)}$"):
        loader.load(name)


def test_quantized_weights_are_refused_before_torch_is_imported(unmarked: tuple[Path, str]) -> None:
    folder, said = unmarked
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(said)}$"):
        check_model(str(folder), strict=True)


def test_float64_weights_and_integer_masks_are_read(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].double()
    mask = torch.ones(4, dtype=torch.uint8)
    save_file(weights | {"model.layers.0.self_attn.causal_mask": mask}, folder / "model.safetensors", {"format": "pt"})
    check_model(str(folder), strict=True)
    loaded, whole = (loader.load(str(name), device="cpu").model.state_dict() for name in (folder, DEMO_MODEL))
    assert all(torch.equal(loaded[name], weight) for name, weight in whole.items())


@pytest.fixture(params=["self_attn.o_proj.bias", "self_attn.q_norm.weight"])
def surplus(request: pytest.FixtureRequest, folder: Path) -> tuple[Path, str]:
    """A copy with a weight that config.json has no place for, and the sentence that refuses it."""
    name = f"model.layers.1.{request.param}"
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {name: torch.ones(192)}, folder / "model.safetensors", {"format": "pt"})
    kind = json.loads(settings())["architectures"][0]
    return folder, (
        f"{folder} has {name}, which its model ({kind} by config.json) has no place for; use a config.json that "
        "describes these weights"
    )


@pytest.mark.parametrize("path", ["whole", "streamed", "ranks", "device"])
def test_weights_that_the_model_has_no_place_for_are_refused(
    path: str, surplus: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were dropped, so that the model wrote something else. The meta device is the GPU."""
    folder, said = surplus
    if path == "device":
        monkeypatch.setattr(loader, "pick_device", lambda _: torch.device("meta"))
    stream = StreamingOptions("full_stream" if path == "streamed" else "off")

    def load(ranks: RankGroup | None) -> None:
        loader.load(str(folder), stream=stream, ranks=ranks)

    with pytest.raises(ModelUnsupported, match=f"^{re.escape(said)}$"):
        on_ranks(2, tmp_path, load) if path == "ranks" else load(None)


def test_a_mixtures_surplus_weight_is_named(tmp_path: Path) -> None:
    """transformers renames and merges the weights of its experts."""
    saved(tmp_path, "MixtralForCausalLM")
    for file in DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    loader.load(str(tmp_path), device="cpu")
    with pytest.raises(ModelUnsupported, match=r"of several experts at once, which is not streamed"):
        loader.load(str(tmp_path), device="cpu", dtype="float32", stream=StreamingOptions("full_stream"))
    name = "model.layers.1.self_attn.q_proj.bias"
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {name: torch.ones(64)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelUnsupported, match=f"{name}, which its model .* has no place for"):
        loader.load(str(tmp_path), device="cpu")


def test_weights_that_the_model_does_not_run_are_read(folder: Path) -> None:
    """Layers for speculation come after the model's own, and older files have the frequencies of positions."""
    weights = load_file(folder / "model.safetensors")
    layers = json.loads(settings())["num_hidden_layers"]
    for name in (f"layers.{layers}.self_attn.q_proj.weight", "layers.0.self_attn.rotary_emb.inv_freq", "mask.bias"):
        weights[f"model.{name}"] = torch.ones(8)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    loaded, whole = (loader.load(str(name), device="cpu").model.state_dict() for name in (folder, DEMO_MODEL))
    assert all(torch.equal(loaded[name], weight) for name, weight in whole.items())
