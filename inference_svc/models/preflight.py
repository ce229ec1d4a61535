"""What can be said of a model, a device and a type within a second: before torch is imported, which takes many."""

from __future__ import annotations

import ctypes
import json
import os
import re
from pathlib import Path
from typing import TypeVar

from kvsidecar.errors import ConfigurationError, ModelUnsupported
from kvsidecar.models.model_pull import default_model

from inference_svc.lora.adapter_dir import Folder, open_folder
from inference_svc.models.model_resolver import resolve
from inference_svc.models.random_models import PREFIX, check_shape
from inference_svc.models.supported_architectures import check_name
from inference_svc.server.worker_config import ModelSettings

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_GGUF_MAGIC = b"GGUF"
# The draft is the model itself, at fewer bits.
SELF = "self"
_NEEDED = ("config.json", "tokenizer_config.json")


M = TypeVar("M", bound=ModelSettings)


def settled(settings: M) -> M:
    """The settings with a model that is here, fetched first where that can be done. Raises ConfigurationError or
    ModelUnsupported for what would certainly be refused later."""
    check_device(settings.device)
    check_dtype(settings.dtype, settings.device)
    try:
        check_draft(settings.speculate, settings.draft_model, settings.strict)
        if not settings.model:
            settings = settings.model_copy(update={"model": default_model()})
        check_model(settings.model, settings.strict)
        open_adapters(settings)
    except PermissionError as error:  # a folder that this user may not look into
        raise ConfigurationError(f"cannot read {error.filename}: {error.strerror}") from error
    return settings


def open_adapters(settings: ModelSettings) -> list[Folder]:
    """What is known of the adapters before a model is loaded. Raises ConfigurationError."""
    model = settings.public_name
    if model in settings.adapters:
        raise ConfigurationError(f"a LoRA adapter is called {model!r}, as the model is; choose another name for it")
    if settings.lora_root is not None and not settings.lora_root.expanduser().is_dir():
        raise ConfigurationError(f"lora_root is {settings.lora_root}, and there is no such folder; create it first")
    return [open_folder(name, path) for name, path in settings.adapters.items()]


def check_device(name: str) -> None:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``, where the driver has so many. Raises ConfigurationError."""
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
    """Raises ConfigurationError for a type that the device does not compute in."""
    on_cpu = device == "cpu" or (device == "auto" and name == "float16" and cuda_devices() == 0)
    if name not in _DTYPES or (name == "float16" and on_cpu):
        raise ConfigurationError(f"dtype is {name!r}; allowed are auto, float32, bfloat16 and, on CUDA, float16")


def check_model(name: str, strict: bool) -> None:
    """Raises ModelUnsupported for a name that stands for nothing, and for files that are not a model that is served."""
    if name.startswith(PREFIX):
        check_shape(name)
        return
    found = resolve(name)
    if found.is_file():
        _check_gguf(found)
        return
    check_folder(found)
    for file in found.glob("*.safetensors"):
        if not os.access(file, os.R_OK):
            raise ModelUnsupported(f"cannot read {file}: permission denied")
    try:
        kinds = json.loads((found / "config.json").read_text(encoding="utf-8")).get("architectures")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelUnsupported(f"cannot read {found / 'config.json'}: {error}") from error
    check_name((kinds or ["(none named)"])[0], strict)


def check_draft(speculate: str, name: str, strict: bool) -> None:
    """Raises ConfigurationError or ModelUnsupported for a model that cannot guess."""
    if speculate == "draft" and not name:
        raise ConfigurationError(
            "speculate is draft, and no draft_model is named; name a smaller model with the same tokenizer, or choose "
            "ngram, which needs none"
        )
    if name and name != SELF:
        check_model(name, strict)


def check_folder(folder: Path) -> None:
    """Raises ModelUnsupported when it is not a whole model."""
    for needed in _NEEDED:
        if not (folder / needed).is_file():
            raise ModelUnsupported(f"{folder} has no {needed}; point --model to a complete Hugging Face model folder")


def _check_gguf(file: Path) -> None:
    try:
        with file.open("rb") as data:
            if data.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC:
                return
    except OSError as error:
        raise ModelUnsupported(f"cannot read {file}: {error.strerror}") from error
    raise ModelUnsupported(f"{file} is no GGUF file; point --model to one, or to a Hugging Face model folder")


def cuda_devices() -> int:
    """How many GPUs the driver has; 0 without one. It creates no context and takes no memory of theirs."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value
