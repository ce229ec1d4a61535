"""Files of a folder that have the weights: the files that transformers reads."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from kvsidecar.errors import ModelUnsupported
from kvsidecar.models.checkpoint_files import tensor_files
from safetensors.torch import load_file, save_file

from inference_svc.models.loader import load
from inference_svc.models.model_resolver import DEMO_MODEL
from inference_svc.models.safetensors_reader import tensor_in

INDEX = "model.safetensors.index.json"


def save(file: Path, **values: float) -> None:
    save_file({name: torch.tensor([value]) for name, value in values.items()}, file)


def read(folder: Path) -> dict[str, float]:
    where = tensor_files(folder)
    return {name: tensor_in(where, name).item() for name in where}


def test_a_file_beside_the_model_replaces_no_weights(tmp_path: Path) -> None:
    """The last file in alphabetical order won: streaming and devices read other weights than a CPU."""
    save(tmp_path / "model.safetensors", a=1.0)
    save(tmp_path / "model.variant.safetensors", a=2.0, b=2.0)
    assert read(tmp_path) == {"a": 1.0}


def test_an_index_names_the_files(tmp_path: Path) -> None:
    save(tmp_path / "consolidated.safetensors", a=3.0, c=3.0)
    save(tmp_path / "model-00001-of-00002.safetensors", a=1.0)
    save(tmp_path / "model-00002-of-00002.safetensors", b=2.0)
    save(tmp_path / "other.safetensors", b=3.0)
    names = {name: f"model-0000{part}-of-00002.safetensors" for name, part in (("a", 1), ("b", 2))}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    assert read(tmp_path) == {"a": 1.0, "b": 2.0}
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    said = f"{tmp_path / INDEX} names model-00002-of-00002.safetensors, which is missing; download the model again"
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(said)}$"):
        tensor_files(tmp_path)


def test_a_name_in_two_files_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "one.safetensors", a=1.0)
    save(tmp_path / "two.safetensors", a=2.0)
    said = f"{tmp_path} has the tensor a in one.safetensors and in two.safetensors; keep one model's files"
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(said)}$"):
        tensor_files(tmp_path)


@pytest.mark.parametrize("index", ["{", "{}", "[]", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map_is_damaged(tmp_path: Path, index: str) -> None:
    save(tmp_path / "model-00001-of-00001.safetensors", a=1.0)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(str(tmp_path / INDEX))} is damaged: "):
        tensor_files(tmp_path)


def test_a_model_with_a_weight_in_two_files_is_not_loaded(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO_MODEL, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(weights)}
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    for file in set(files.values()):
        save_file(weights, folder / file, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelUnsupported, match=r"has the tensor .* in model-00001-of-00002\..* and in model-00002-of"):
        load(str(folder))


def header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        header("{}")[:9],
        header("x" * 100),
        header("[]"),
        header('{"a": 1}'),
        header('{"a": {"data_offsets": [0]}}'),
        header('{"a": {"data_offsets": ["x", "y"]}}'),
        header('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}') + b"123",
    ],
)
def test_a_damaged_file_is_named_before_torch_reads_it(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(str(file))} is damaged: .*; download the model again$"):
        tensor_files(tmp_path)
