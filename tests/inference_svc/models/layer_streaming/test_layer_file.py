"""The file of layers: whole or not there, checked when it is opened, written again when it is damaged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kvkernels.cpu import large_pages
from kvsidecar.errors import ConfigurationError, ModelUnsupported
from kvsidecar.models.model_library import ModelLibrary
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.layer_streaming import layer_file_builder
from inference_svc.models.layer_streaming.layer_file import ALIGNMENT, INDEX, VECTORS, WEIGHTS, LayerFile
from inference_svc.models.layer_streaming.read_ahead import WeightsUnreadable
from inference_svc.models.layer_streaming.residency_plan import StreamingOptions
from inference_svc.models.loader import DEMO_MODEL, LoadedModel, load
from tests.inference_svc.models.layer_streaming.conftest import computed

FULL = StreamingOptions("full_stream", slots=2)


def loaded(name: str = "shape:tiny", dtype: str = "float32", asked: StreamingOptions = FULL) -> LoadedModel:
    return load(name, device="cpu", dtype=dtype, stream=asked)


def answer(name: str = "shape:tiny") -> list[Tensor]:
    model = loaded(name)
    assert model.streamed is not None
    try:
        return computed(model)
    finally:
        model.streamed.close()


@pytest.fixture(scope="module")
def written(home: Path) -> tuple[Path, list[Tensor]]:
    """The folder of shape:tiny's layers, and what they compute."""
    want = answer()
    (folder,) = home.glob("shape-tiny-*")
    return folder, want


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as data:
        data.seek(at)
        byte = data.read(1)
        data.seek(at)
        data.write(bytes([byte[0] ^ 4]))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit of the weights": lambda folder: flip(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - ALIGNMENT),
    "a bit of the vectors": lambda folder: flip(folder / VECTORS, (folder / VECTORS).stat().st_size - 3),
    "a bit of the index": lambda folder: flip(folder / INDEX, 90),
    "the end of the weights": lambda folder: os.truncate(folder / WEIGHTS, 2 * ALIGNMENT),
    "all of the vectors": lambda folder: (folder / VECTORS).unlink(),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_noticed_and_the_file_written_again(written: tuple[Path, list[Tensor]], what: str) -> None:
    folder, want = written
    DAMAGE[what](folder)
    with capture_logs() as log:
        got = answer()
    assert [e["event"] for e in log].count("the file of layers is damaged, it is written again") == 1
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with capture_logs() as log:
        answer()
    assert not [e for e in log if "writ" in e["event"]], "the new one is whole"


def test_a_file_that_ends_or_goes_while_it_is_read_fails_that_forward_alone(
    written: tuple[Path, list[Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, want = written
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    copied = tmp_path / "kvsidecar" / "models" / "converted" / folder.name
    shutil.copytree(folder, copied)
    model, whole = loaded(), (copied / WEIGHTS).read_bytes()
    assert model.streamed is not None
    decoder = Decoder(model)
    os.truncate(copied / WEIGHTS, model.streamed.file.index.embedding.end)
    with pytest.raises(WeightsUnreadable, match=r"weights could not be read from their file: .* ends"):
        computed(model, decoder)
    (copied / WEIGHTS).write_bytes(whole)
    got = computed(model, decoder)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    ModelLibrary().discard(copied, copied.stat().st_ino)
    assert not copied.exists()
    assert all(torch.equal(a, b) for a, b in zip(computed(model, decoder), want, strict=True)), "it is open"
    model.streamed.close()


def test_a_damaged_folder_that_was_replaced_meanwhile_is_left_alone(written: tuple[Path, list[Tensor]]) -> None:
    folder, _ = written
    ModelLibrary().discard(folder, folder.stat().st_ino + 1)
    assert folder.is_dir()


def test_many_at_once_write_one_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(home.parent / "together"))
    builds = list[Path]()

    def build(folder: Path, recipe: layer_file_builder.LayerFileRecipe, size: int) -> None:
        builds.append(folder)
        layer_file_builder.build_layer_file(folder, recipe, size)

    monkeypatch.setattr("inference_svc.models.layer_streaming.streamed_model.build_layer_file", build)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: answer(), range(3)))
    assert len(builds) == 1
    assert all(torch.equal(a, b) for a, b in zip(answers[0], answers[2], strict=True))


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigurationError, match=r"writing the layers of shape:tiny out takes .* has 1.0 MiB left"):
        loaded()
    assert not list((tmp_path / "kvsidecar" / "models" / "converted").glob("[!.]*"))


# ---- checkpoints -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model in three files, its layers strewn over them."""
    folder = tmp_path_factory.mktemp("shards")
    shutil.copytree(DEMO_MODEL, folder, dirs_exist_ok=True)
    (folder / "model.safetensors").unlink()
    tensors = sorted(load_file(DEMO_MODEL / "model.safetensors").items())
    for i in range(3):
        part = {name: tensor for n, (name, tensor) in enumerate(tensors) if n % 3 == i}
        save_file(part, folder / f"model-{i + 1:05}-of-00003.safetensors", {"format": "pt"})
    weights = {name: f"model-{n % 3 + 1:05}-of-00003.safetensors" for n, (name, _) in enumerate(tensors)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return folder


def test_a_checkpoint_in_many_files_is_read_layer_by_layer(home: Path, shards: Path) -> None:
    want = computed(load(str(shards), device="cpu", dtype="float32"))
    got = answer(str(shards))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    listed = {one.source: one for one in ModelLibrary().listed()}
    assert f"written out of {shards / 'config.json'}" in listed


def test_a_weight_that_is_not_there_is_named(home: Path, shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lacking"
    shutil.copytree(shards, folder)
    file = folder / "model-00001-of-00003.safetensors"
    tensors = load_file(file)
    gone = min(name for name in tensors if "layers.7." in name)
    save_file({name: t for name, t in tensors.items() if name != gone}, file, {"format": "pt"})
    with pytest.raises(ModelUnsupported, match=f"have no {gone}, by which streaming would find it"):
        loaded(str(folder))


def test_experts_are_refused_in_one_sentence(home: Path, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=4096,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path / name)
    with pytest.raises(ModelUnsupported, match="experts at once, which is not streamed; use --stream off"):
        loaded(str(tmp_path))


# ---- reading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
def test_reading_past_the_page_cache_and_by_way_of_it_gives_the_same_bytes(
    written: tuple[Path, list[Tensor]], direct: bool
) -> None:
    folder, _ = written
    file, data = LayerFile(folder, direct), (folder / WEIGHTS).read_bytes()
    assert direct or not file.direct
    for layer in file.index.layers:
        for stored in layer.values():
            memory = large_pages.allocate(stored.end - stored.at)
            assert file.read(memory.numpy().data, stored.at) == stored.end - stored.at
            assert bytes(memory.numpy()) == data[stored.at : stored.end]
