"""A model gets no chunks of another model, however few of their weights differ."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from inference_svc import Engine
from inference_svc.models.model_resolver import DEMO_MODEL

PROMPT = "The city of Alder has 12 bridges. The city of Birch has 14 bridges. " * 12


def copy_with(folder: Path, scale: float) -> Path:
    """Copy the built-in model with some rows of its embedding scaled."""
    shutil.copytree(DEMO_MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    rows[100:900] *= scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_model_with_other_rows_gets_no_hit(tmp_path: Path) -> None:
    first, second = copy_with(tmp_path / "first", 1.0), copy_with(tmp_path / "second", -1.0)
    settings = {"dtype": "float32", "pool_bytes": 64 << 20, "arena_bytes": "64MiB", "store": tmp_path / "store"}
    options = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    with Engine.from_pretrained(str(first), **settings) as engine:
        assert engine.warm(PROMPT) > 100
    with Engine.from_pretrained(str(first), **settings) as engine:
        assert engine.generate(PROMPT, **options).cached_tokens > 100
    with Engine.from_pretrained(str(second), **settings) as engine:
        assert engine.generate(PROMPT, **options).cached_tokens == 0
