"""Models without weights: parameters on the meta device, real buffers."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, GenerationConfig


class _BuildState(threading.local):
    building = False


_state = _BuildState()


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Tensor | None:
    if not _state.building or parameter is None or parameter.is_meta:
        return None
    return nn.Parameter(parameter.to("meta"))


# torch calls the hook for modules of all threads. The hook stays registered; a thread that builds sets ``_state``.
register_module_parameter_registration_hook(_to_meta)  # type: ignore[arg-type]


def build_meta_model(config: Any, dtype: torch.dtype, attention: str) -> Any:
    """Build a model with parameters on the meta device. Buffers are real, because no checkpoint contains them."""
    _state.building = True
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    finally:
        _state.building = False


def set_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Give a model from ``build_meta_model`` its weights, without a copy."""
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()


def set_generation_config(model: Any, folder: Path) -> None:
    """Give a model the generation config of a folder, if there is one."""
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
