"""Folders whose files are incomplete or damaged are refused in one sentence."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from kvsidecar.errors import ModelUnsupported
from safetensors.torch import load_file, save_file

from inference_svc.models import loader
from inference_svc.models.model_check import check_model
from inference_svc.models.model_resolver import DEMO_MODEL


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
    said = f"{folder} has no tokenizer: no tokenizer.json, *.model, vocab.*, *.tiktoken, tekken.json; download the model again"
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(said)}$"):
        check_model(str(folder), strict=True)
    with pytest.raises(ModelUnsupported, match=f"^{re.escape(said)}$"):
        loader.load(str(folder))
