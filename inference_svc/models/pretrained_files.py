"""Reads a model's folder with transformers; a damaged file is ModelUnsupported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from kvsidecar.errors import ModelUnsupported
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from inference_svc.models.mixture_of_experts import EXPERTS
from inference_svc.models.surplus_weights import check_surplus

# Errors of transformers, and of its strict configuration classes, for settings that describe no model.
BAD_SETTINGS = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, StrictDataclassError)


def read_config(folder: Path) -> Any:
    """Read config.json. Raises ModelUnsupported."""
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, *BAD_SETTINGS) as error:
        raise ModelUnsupported(f"cannot read {folder / 'config.json'}: {one_line(error)}") from error


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer. Raises ModelUnsupported."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises Exception itself
        raise ModelUnsupported(f"cannot load the tokenizer in {folder}: {one_line(error)}") from error


def read_model(folder: Path, dtype: torch.dtype, attention: str, device: torch.device) -> Any:
    """Read a model to host memory.

    Raises ModelUnsupported for missing weights, which would get random numbers, and for surplus ones.
    """
    # Our expert function keeps a row's bits, but only on a CPU. On a device, transformers' function is faster.
    experts = EXPERTS if device.type == "cpu" else None
    model, found = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, experts_implementation=experts, output_loading_info=True
    )
    if found["missing_keys"]:
        raise ModelUnsupported(f"the files in {folder} have no {min(found['missing_keys'])}, which the model needs")
    check_surplus(folder, model, found["unexpected_keys"])
    return model


def one_line(error: Exception) -> str:
    """Return the type and the text of an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
