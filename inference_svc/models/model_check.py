"""Checks of a model, device and dtype before torch is imported.

Each check takes less than a second; importing torch takes many.
"""

from __future__ import annotations

import ctypes
import json
import re
from pathlib import Path
from typing import Any

from kvsidecar.errors import ConfigurationError, ModelUnsupported
from kvsidecar.models.checkpoint_files import tensor_dtypes, tensor_files

from inference_svc.models.model_resolver import resolve
from inference_svc.models.random_models import PREFIX, check_shape
from inference_svc.models.supported_architectures import check_name

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_WEIGHT_DTYPES = ("F32", "BF16", "F16", "F64")  # of weights that are not quantized, in the words of safetensors
_GGUF_MAGIC = b"GGUF"
# The draft model is a copy of the model itself, at fewer bits.
SELF = "self"
_NEEDED = ("config.json", "tokenizer_config.json")
_SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
# A tokenizer has one of them; tokenizer_config.json alone makes an empty one.
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")


def check_device(name: str) -> None:
    """Check ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` against the driver's devices.

    Raises ConfigurationError.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name):
        raise ConfigurationError(f"device is {name!r}; allowed are auto, cpu, cuda and cuda:N")
    if name.startswith("cuda"):
        found, wanted = cuda_devices(), int(name.partition(":")[2] or 0)
        if found == 0:
            raise ConfigurationError(
                f"device is {name!r}, and this machine has no CUDA device or no driver for it; use cpu, or run "
                "kvsidecar doctor"
            )
        if wanted >= found:
            raise ConfigurationError(f"device is {name!r}, and this machine has {found}: cuda:0 to cuda:{found - 1}")


def check_dtype(name: str, device: str) -> None:
    """Raise ConfigurationError for a dtype that the device does not compute in."""
    on_cpu = device == "cpu" or (device == "auto" and name == "float16" and cuda_devices() == 0)
    if name not in _DTYPES or (name == "float16" and on_cpu):
        raise ConfigurationError(f"dtype is {name!r}; allowed are auto, float32, bfloat16 and, on CUDA, float16")


def check_model(name: str, strict: bool) -> None:
    """Raise ModelUnsupported for an unknown name, and for files of an unsupported model."""
    if name.startswith(PREFIX):
        check_shape(name)
        return
    found = resolve(name)
    if found.is_file():
        _check_gguf(found)
        return
    check_folder(found)
    tensor_files(found)
    check_dtypes(found)
    kinds = _read_object(found / "config.json").get("architectures")
    check_name((kinds or ["(none named)"])[0], strict)


def check_folder(folder: Path) -> None:
    """Raise ModelUnsupported for a folder that is not a complete model. Does not open the weights' files."""
    for needed in _NEEDED:
        if not (folder / needed).is_file():
            raise ModelUnsupported(f"{folder} has no {needed}; point --model to a complete Hugging Face model folder")
    if not any(any(folder.glob(pattern)) for pattern in _VOCABULARIES):
        raise ModelUnsupported(f"{folder} has no tokenizer: no {', '.join(_VOCABULARIES)}; download the model again")
    _check_settings(folder)


def check_dtypes(folder: Path) -> None:
    """Raise ModelUnsupported for quantized weights in a folder whose config.json has no quantization_config.

    Some exports describe their scales elsewhere, such as in hf_quant_config.json. Nothing would apply these scales.
    """
    if _read_object(folder / "config.json").get("quantization_config"):
        return
    for name, dtype in sorted(tensor_dtypes(folder).items()):
        # A tensor of any name may be floating point of 8 or fewer bits; masks and counters are integers.
        if dtype not in _WEIGHT_DTYPES and (name.endswith(".weight") or dtype.startswith("F")):
            raise ModelUnsupported(
                f"{name} is {dtype} in {folder}, whose config.json has no quantization_config; allowed are "
                f"{', '.join(_WEIGHT_DTYPES)}: use a checkpoint that is not quantized"
            )


def _check_settings(folder: Path) -> None:
    """Raise ModelUnsupported for settings of the wrong type that transformers or the loader would crash on."""
    _read_object(folder / "tokenizer_config.json")
    config, generation = folder / "config.json", folder / "generation_config.json"
    shape = _read_object(config)
    for name in _SIZES:
        size = shape.get(name)
        if size is not None and not (type(size) is int and size > 0):
            raise ModelUnsupported(f"{name} is {size!r} in {config}; allowed are positive integers")
    pad, rows = shape.get("pad_token_id"), shape.get("vocab_size")
    if type(pad) is int and type(rows) is int and not -rows <= pad < rows:  # PyTorch counts negative ids from the end
        raise ModelUnsupported(f"pad_token_id is {pad} in {config}; allowed are 0 to {rows - 1}, by its vocab_size")
    ends = _read_object(generation).get("eos_token_id") if generation.is_file() else None
    if ends is not None and not all(type(end) is int for end in (ends if isinstance(ends, list) else [ends])):
        raise ModelUnsupported(f"eos_token_id is {ends!r} in {generation}; allowed are an integer and a list of them")


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise ModelUnsupported(f"cannot read {file}: it is not a JSON object")
    return found


def _check_gguf(file: Path) -> None:
    try:
        with file.open("rb") as data:
            if data.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC:
                return
    except OSError as error:
        raise ModelUnsupported(f"cannot read {file}: {error.strerror}") from error
    raise ModelUnsupported(f"{file} is no GGUF file; point --model to one, or to a Hugging Face model folder")


def cuda_devices() -> int:
    """Number of GPUs that the driver reports; 0 without a driver. Creates no CUDA context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
