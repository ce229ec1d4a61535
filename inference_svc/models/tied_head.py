"""Finds heads that config.json calls tied to the embedding, and that have weights of their own.

A fine-tuning that trains the head of a tied model leaves such a checkpoint. transformers then ties nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from kvsidecar.models.checkpoint_files import tensor_files

from inference_svc.models.safetensors_reader import rows_in, shape_in

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS = 2048  # rows that are compared at a time


def untie_own_head(config: Any, folder: Path) -> bool:
    """Set ``tie_word_embeddings`` to false if the folder's files have a head that differs from the embedding.

    Reads weights only if both are stored. Returns True if it changed ``config``. Raises ModelUnsupported for damaged
    files.
    """
    if not getattr(config, "tie_word_embeddings", False):
        return False
    where = tensor_files(folder)
    if not {_EMBEDDING, _HEAD} <= where.keys() or _are_equal(where):
        return False
    config.tie_word_embeddings = False
    return True


def _are_equal(where: dict[str, Path]) -> bool:
    shape = shape_in(where, _HEAD)
    if shape != shape_in(where, _EMBEDDING):
        return False
    for first in range(0, shape[0], _ROWS):
        end = min(first + _ROWS, shape[0])
        head, embedding = (rows_in(where, name, first, end).float() for name in (_HEAD, _EMBEDDING))
        if not torch.equal(head, embedding):
            return False
    return True
