"""Preflight: checks of a worker's settings before torch is imported.

The checks take less than a second, the import of torch takes many.
"""

from __future__ import annotations

from typing import TypeVar

from kvsidecar.byte_sizes import format_size
from kvsidecar.errors import ConfigurationError
from kvsidecar.models.model_pull import default_model
from kvsidecar.process.free_memory import memory_limit_bytes

from inference_svc.lora.adapter_dir import AdapterDir, open_adapter_dir
from inference_svc.models.model_check import SELF, check_device, check_dtype, check_model, cuda_devices
from inference_svc.server.worker_config import ModelSettings
from inference_svc.tensor_parallel.rank_limits import check_ranks

M = TypeVar("M", bound=ModelSettings)


def checked_settings(settings: M) -> M:
    """Check settings, and download the default model if none is named.

    Raises ConfigurationError or ModelUnsupported for settings that the worker would refuse later in any case.
    """
    check_device(settings.device)
    check_dtype(settings.dtype, settings.device)
    check_pool_bytes(settings)
    check_ranks(settings)
    try:
        check_draft(settings.speculate, settings.draft_model, settings.strict)
        if not settings.model:
            settings = settings.model_copy(update={"model": default_model()})
        check_model(settings.model, settings.strict)
        open_adapters(settings)
    except PermissionError as error:  # the user may not read a folder
        raise ConfigurationError(f"cannot read {error.filename}: {error.strerror}") from error
    return settings


def has_host_pool(settings: ModelSettings) -> bool:
    """Return True if the KV pool is in host memory."""
    return settings.device == "cpu" or (settings.device == "auto" and cuda_devices() == 0)


def check_pool_bytes(settings: ModelSettings) -> None:
    """Raise ConfigurationError if a KV pool in host memory exceeds the limit of the machine or control group."""
    limit, size = memory_limit_bytes(), settings.planned_pool_bytes
    if has_host_pool(settings) and size > limit:
        raise ConfigurationError(
            f"pool_bytes is {format_size(size)}, and this process may have {format_size(limit)} of "
            "memory (machine and control group), in which the model's weights must be, too; choose a smaller one, or "
            "raise the limit"
        )


def open_adapters(settings: ModelSettings) -> list[AdapterDir]:
    """Check the adapters' folders before the model is loaded. Raises ConfigurationError."""
    model = settings.public_name
    if model in settings.adapters:
        raise ConfigurationError(f"a LoRA adapter is called {model!r}, as the model is; choose another name for it")
    if settings.lora_root is not None and not settings.lora_root.expanduser().is_dir():
        raise ConfigurationError(f"lora_root is {settings.lora_root}, and there is no such folder; create it first")
    return [open_adapter_dir(name, path) for name, path in settings.adapters.items()]


def check_draft(speculate: str, name: str, strict: bool) -> None:
    """Raise ConfigurationError or ModelUnsupported if the draft model is missing or unusable."""
    if speculate == "draft" and not name:
        raise ConfigurationError(
            "speculate is draft, and no draft_model is named; name a smaller model with the same tokenizer, or choose "
            "ngram, which needs none"
        )
    if name and name != SELF:
        check_model(name, strict)
