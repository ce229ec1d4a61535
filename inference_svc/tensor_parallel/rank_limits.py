"""Rank limits: settings that the ranks of a tensor-parallel worker do not support yet. Imports no torch."""

from __future__ import annotations

from kvsidecar.errors import ConfigurationError

from inference_svc.server.worker_config import ModelSettings


def check_ranks(settings: ModelSettings) -> None:
    """Raise ConfigurationError for a setting that works only with tensor_parallel_size 1."""
    size = settings.tensor_parallel_size
    if size == 1:
        return
    refused: tuple[tuple[str, bool, str], ...] = (
        ("stream", settings.stream not in ("auto", "off"), "auto and off"),
        ("speculate", settings.speculate in ("draft", "auto"), "off and ngram"),
        ("draft_model", bool(settings.draft_model), "none"),
        ("lora", bool(settings.lora), "none"),
        ("lora_root", settings.lora_root is not None, "none"),
        ("reuse_anywhere", settings.reuse_anywhere, "false"),
        ("unverified_reuse", bool(getattr(settings, "unverified_reuse", False)), "false"),
        ("overflow_bytes", settings.overflow_bytes not in ("auto", 0), "auto and 0"),
        ("weights", settings.weights == "codes", "auto, 16, 8 and 4"),
        ("device", settings.device.startswith("cuda:"), "auto, cpu and cuda"),
    )
    for name, is_set, allowed in refused:
        if is_set:
            raise ConfigurationError(
                f"{name} is {getattr(settings, name)}, and tensor_parallel_size is {size}: with several ranks, allowed "
                f"for {name}: {allowed}"
            )
