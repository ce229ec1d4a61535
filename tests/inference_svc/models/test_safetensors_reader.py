"""Reading single tensors of a model's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kvsidecar.errors import ModelUnsupported
from kvsidecar.models.checkpoint_files import tensor_files
from safetensors.torch import save_file

from inference_svc.models import safetensors_reader


def test_a_tensor_is_read_whole_or_by_rows(tmp_path: Path) -> None:
    stored = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3)
    save_file({"a": stored}, tmp_path / "one.safetensors")
    save_file({"b": stored + 1}, tmp_path / "two.safetensors")
    where = tensor_files(tmp_path)
    assert {name: file.name for name, file in where.items()} == {"a": "one.safetensors", "b": "two.safetensors"}
    assert torch.equal(safetensors_reader.tensor_in(where, "b"), stored + 1)
    assert torch.equal(safetensors_reader.rows_in(where, "a", 1, 3), stored[1:3])
    assert safetensors_reader.shape_in(where, "a") == [4, 3]
    assert safetensors_reader.dtype_in(where, "a") is torch.bfloat16


def test_a_missing_tensor_is_named_for_any_model(tmp_path: Path) -> None:
    """A checkpoint with 16-bit weights was told that its 4-bit weights lack a tensor."""
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=r"have no norm\.weight, which the model needs$"):
        safetensors_reader.tensor_in(tensor_files(tmp_path), "norm.weight")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(ModelUnsupported, match=r"model\.safetensors is damaged"):
        tensor_files(tmp_path)
