"""Folders that are no adapter of the model: each is refused in one sentence that says what, and where."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kvsidecar.cli.flags import FlagParser, add_flags, format_flags
from kvsidecar.cli.service_settings import read_settings
from kvsidecar.errors import ConfigurationError
from safetensors.torch import save_file
from torch import Tensor

from inference_svc.lora import peft_config
from inference_svc.lora.adapter_dir import open_adapter_dir
from inference_svc.lora.adapter_weights import AdapterWeights, Linears, read_weights
from inference_svc.models.loader import LoadedModel
from inference_svc.server.preflight import checked_settings, open_adapters
from inference_svc.server.worker_config import WorkerConfig
from tests.inference_svc.lora.random_adapters import linears, tensors, write, write_header
from tests.inference_svc.models.test_architectures import build

Weights = dict[str, Tensor]
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def layers() -> Linears:
    loaded: LoadedModel = build("LlamaForCausalLM")[0]
    return linears(loaded)


def read(folder: Path, layers: Linears, name: str = "law") -> AdapterWeights:
    return read_weights(open_adapter_dir(name, folder), layers, "tiny")


def without(name: str) -> Callable[[Weights], Weights]:
    return lambda weights: {key: value for key, value in weights.items() if name not in key}


def with_value(key: str, value: Tensor) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {key: value}


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "says peft_type is 'IA3': input should be 'LORA'"),
    ({"task_type": "SEQ_CLS"}, "says task_type is 'SEQ_CLS'"),
    ({"bias": "all"}, "says bias is 'all': input should be 'none'"),
    ({"r": 0}, "says r is 0: input should be greater than or equal to 1"),
    ({"lora_alpha": "much"}, "says lora_alpha is 'much'"),
    ({"target_modules": None}, "says target_modules is None"),
    ({"target_modules": "(q_proj"}, r"has '\(q_proj', which is no regular expression"),
    ({"target_modules": "q" * 1025}, "has a pattern of 1025 characters; at most 1024 are allowed"),
    ({"rank_pattern": {f"q{i}": 2 for i in range(1025)}}, "has 1025 patterns; at most 1024 are allowed"),
    ({"use_dora": True}, "sets use_dora: it is a DoRA adapter, whose layers are scaled anew, which is not supported"),
    ({"modules_to_save": ["lm_head"]}, "sets modules_to_save: it has whole layers of its own"),
    ({"fan_in_fan_out": True}, "sets fan_in_fan_out: its weights are transposed"),
    ({"use_qalora": True}, "sets use_qalora: it fits a quantized model alone"),
    ({"target_parameters": ["experts.gate_up_proj"]}, "sets target_parameters: it changes parameters that are"),
    ({"init_lora_weights": "pissa"}, "says init_lora_weights is 'pissa', which changes the model's own weights too"),
    ({"brand_new": {"x": 1}}, "sets brand_new, which is not known here"),
    ({"rank_pattern": {"q_proj": 0}}, r"has ranks \[0\] in rank_pattern; allowed are 1 to 1024"),
    ({"rank_pattern": {"q_proj": 9}}, r"lora_A of shape \[6, 64\] for model.layers.0.self_attn.q_proj; with rank 9 it"),
    ({"target_modules": ["q_proj"]}, r"has weights for model.layers.*_proj, which target_modules does not name"),
    ({"target_modules": "all-linear", "exclude_modules": ["q_proj"]}, "q_proj, which target_modules does not name"),
]  # fmt: skip
WEIGHTS: list[tuple[Callable[[Weights], Weights], str]] = [
    (without("layers.3.mlp.up_proj"), "has no weights for model.layers.3.mlp.up_proj, which target_modules names"),
    (without("q_proj.lora_B"), "has only lora_A of model.layers.0.self_attn.q_proj; both matrices are needed"),
    (lambda weights: {}, "has no weights"),
    (with_value(f"{Q}.lora_magnitude_vector", torch.ones(3)), "q_proj.lora_magnitude_vector', which is no matrix"),
    (with_value("base_model.model.lm_head.lora_A.weight", torch.ones(6, 64)), "has only"),
    (with_value(f"{Q}.lora_A.weight", torch.ones(6, 48)), r"shape \[6, 48\] for .* it must be \[6, 64\] in tiny"),
    (with_value(f"{Q}.lora_B.weight", torch.ones(64)), r"lora_B of shape \[64\]"),
    (with_value(f"{Q}.lora_A.weight", torch.full((6, 64), torch.nan)), "a value in lora_A of .* that is no finite"),
    (with_value(f"{Q}.lora_A.weight", torch.ones(6, 64).to(torch.int8)), "has int8 in lora_A of .*; allowed are"),
    (lambda w: {k.replace("layers.0.", "layers.9."): v for k, v in w.items()},
     "has weights for model.layers.9.*, which is no linear layer in the layers of tiny; it was made for acme/other"),
    (lambda w: {k.replace("mlp.up_proj", "lm_head"): v for k, v in w.items()}, "lm_head, which is no linear layer"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "sentence"), SETTINGS)
def test_settings(settings: dict[str, Any], sentence: str, layers: Linears, tmp_path: Path) -> None:
    write(tmp_path, tensors(layers, 1), **settings)
    with pytest.raises(ConfigurationError, match=sentence) as refused:
        read(tmp_path, layers)
    assert str(refused.value).startswith("LoRA adapter law: ")


@pytest.mark.parametrize(("change", "sentence"), WEIGHTS)
def test_weights(change: Callable[[Weights], Weights], sentence: str, layers: Linears, tmp_path: Path) -> None:
    weights = tensors(layers, 1)
    write(tmp_path, weights, base_model_name_or_path="acme/other")
    save_file(change(weights), tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigurationError, match=sentence) as refused:
        read(tmp_path, layers)
    assert str(refused.value).startswith("LoRA adapter law: ")


BACKTRACKS = r"(.?){40}.{40}Z|(?:(.)|(.)|(.))*\1\2Q"


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": BACKTRACKS},
        {"exclude_modules": BACKTRACKS},
        {"rank_pattern": {BACKTRACKS.replace(r"\1\2", ""): 3}},
    ],
)
def test_a_pattern_that_backtracks_for_ever_is_refused_and_stops_no_other_thread(
    settings: dict[str, Any], layers: Linears, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peft_config, "_MAX_MATCH_SECONDS", 1.5)
    write(tmp_path, tensors(layers, 1), **settings)
    ended, longest = threading.Event(), 0.0

    def watch() -> None:
        nonlocal longest
        before = time.perf_counter()
        while not ended.wait(0.001):
            now = time.perf_counter()
            longest, before = max(longest, now - before), now

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.perf_counter()
    try:
        with pytest.raises(ConfigurationError, match=r"law: .*adapter_config.json has the pattern .*; name the"):
            read(tmp_path, layers)
    finally:
        ended.set()
        watching.join()
    assert longest < (time.perf_counter() - began) / 2, "the GIL was held"


def test_a_list_is_matched_by_name_and_no_pattern(layers: Linears, tmp_path: Path) -> None:
    write(tmp_path, tensors(layers, 1), target_modules=[BACKTRACKS])
    with pytest.raises(ConfigurationError, match="which target_modules does not name"):
        read(tmp_path, layers)


def test_files(layers: Linears, tmp_path: Path) -> None:
    def refused(sentence: str) -> None:
        with pytest.raises(ConfigurationError, match=sentence):
            read(tmp_path / "law", layers)

    refused("LoRA adapter law: there is no folder")
    (tmp_path / "law").mkdir()
    refused("has no adapter_config.json; name a folder that PEFT's save_pretrained wrote")
    write(tmp_path / "law", tensors(layers, 1))
    weights = tmp_path / "law" / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for damaged, sentence in (
        (b"", "is no safetensors file"),
        (b"\x80\x02pickle of old", "is no safetensors file: its header has"),
        (whole[: len(whole) // 2], "cannot be read: "),
    ):
        weights.write_bytes(damaged)
        refused(sentence)
    weights.rename(weights.with_name("adapter_model.bin"))
    refused("has its weights in adapter_model.bin, a pickle, which could run any code; save it as safetensors")
    (tmp_path / "law" / "adapter_model.bin").unlink()
    refused("has no adapter_model.safetensors")
    config = tmp_path / "law" / "adapter_config.json"
    for text, sentence in (("{", "cannot read"), ("[]", "is no JSON object"), ("{}", "has no peft_type; it must be")):
        config.write_text(text)
        refused(sentence)


@pytest.mark.parametrize(
    "shape", ["[Infinity, 2]", "[NaN]", "[2.5, 2]", "[true]", '"64"', "[-1, 2]", f"[{2**63}]", f"[{'9' * 4000}, 2]",
              str([2] * 9), "7"]
)  # fmt: skip
def test_an_impossible_shape_is_refused_by_name(shape: str, layers: Linears, tmp_path: Path) -> None:
    write_header(write(tmp_path, tensors(layers, 1)), shape)
    sentence = r"LoRA adapter law: .* is no safetensors file: '.*q_proj.lora_A.weight' has an impossible shape$"
    with pytest.raises(ConfigurationError, match=sentence) as refused:
        checked_settings(WorkerConfig(model="demo", lora=(f"law={tmp_path}",)))
    assert len(str(refused.value)) < 500
    assert len(str(refused.value).splitlines()) == 1


def test_what_it_computes_names_it_and_nothing_else(layers: Linears, tmp_path: Path) -> None:
    weights = tensors(layers, 1)
    one = read(write(tmp_path / "a", weights), layers).fingerprint
    assert read(write(tmp_path / "b", weights, lora_dropout=0.5), layers, "other").fingerprint == one
    changed = [
        read(write(tmp_path / "c", weights, lora_alpha=10), layers),
        read(write(tmp_path / "d", tensors(layers, 2)), layers),
        read(write(tmp_path / "e", {name: tensor.half() for name, tensor in weights.items()}), layers),
        read(write(tmp_path / "f", tensors(layers, 1, ["q_proj"])), layers),
    ]
    assert len({one, *(other.fingerprint for other in changed)}) == 5


def test_the_setting(layers: Linears, tmp_path: Path) -> None:
    place = write(tmp_path / "a", tensors(layers, 1))
    parser = FlagParser()
    add_flags(parser, WorkerConfig)
    given = vars(parser.parse_args(["--lora", f"law={place}", f"med={place}", f"--lora=x={place}"]))
    config = read_settings(WorkerConfig, given, given.pop("config"))
    assert config == WorkerConfig(lora=f"law={place}, med={place},x={place}")  # type: ignore[arg-type]
    assert config == WorkerConfig(lora=dict.fromkeys(config.adapters, place))  # type: ignore[arg-type]
    assert list(config.adapters) == ["law", "med", "x"]
    assert [folder.name for folder in open_adapters(config)] == ["law", "med", "x"]
    assert open_adapters(config)[0].max_bytes == 12 * sum(t.numel() for t in tensors(layers, 1).values())
    assert format_flags({"lora": config.lora, "port": 1}) == [
        *(f"--lora={name}={place}" for name in config.adapters),
        "--port=1",
    ]
    for given, sentence in (
        ([str(place)], "lora is .*is not NAME=FOLDER with a name of at most 96"),
        (["law="], "'law=' is not NAME=FOLDER"),
        (["a b=x"], "'a b=x' is not NAME=FOLDER"),
        (["law=x", "law=y"], "two adapters are called 'law'"),
        ([f"a{i}=x" for i in range(33)], "there are 33 adapters; at most 32 are allowed"),
    ):
        with pytest.raises(ConfigurationError, match=sentence):
            read_settings(WorkerConfig, {"lora": given}, None)
    with pytest.raises(ConfigurationError, match="a LoRA adapter is called 'demo', as the model is"):
        checked_settings(WorkerConfig(model="demo", lora=(f"demo={place}",)))
    config_file = place / "adapter_config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"use_dora": True}))
    with pytest.raises(ConfigurationError, match="DoRA"):
        checked_settings(WorkerConfig(model="demo", lora=(f"law={place}",)))
