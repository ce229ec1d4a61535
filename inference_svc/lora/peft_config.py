"""``adapter_config.json`` of PEFT (peft 0.21): changed layers, ranks and scales.

Imports no torch, so that an unsupported adapter is refused before a model is loaded.
"""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any, Literal

import regex
from kvsidecar.errors import ConfigurationError
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

CONFIG = "adapter_config.json"
_ALL_LINEAR = "all-linear"
_MAX_RANK, _MAX_FILE_BYTES = 1024, 1 << 20
# A pattern may backtrack forever, so this limits the matching time of all patterns of an adapter together. Usual
# patterns take milliseconds.
_MAX_MATCH_SECONDS, _MAX_PATTERNS, _MAX_PATTERN_LENGTH = 5.0, 1024, 1024
# The first number in a module's path is its layer number.
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")
# Unsupported settings, and the reason for each.
_REFUSED = {
    "alora_invocation_tokens": "it changes only what follows certain tokens (activated LoRA)",
    "arrow_config": "it routes between adapters",
    "fan_in_fan_out": "its weights are transposed, for layers that no model here has",
    "kasa_config": "it needs more than two matrices for a layer",
    "layer_replication": "it repeats layers of the model",
    "lora_bias": "it has biases",
    "megatron_config": "it was split by Megatron",
    "modules_to_save": "it has whole layers of its own",
    "target_parameters": "it changes parameters that are no linear layers, such as those of experts",
    "trainable_token_indices": "it changes embeddings",
    "use_bdlora": "its matrices are block-diagonal",
    "use_dora": "it is a DoRA adapter, whose layers are scaled anew",
    "use_qalora": "it fits a quantized model alone (QA-LoRA)",
}
# Settings that affect only training.
_WITHOUT_EFFECT = {
    "auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "inference_mode", "loftq_config",
    "lora_dropout", "lora_ga_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "unsloth_fixed", "velora_config",
}  # fmt: skip
# Other initializations (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) are refused: they also change the model's own weights.
_SUPPORTED_INITS = (None, True, False, "gaussian", "orthogonal", "eva")


class PatternRefused(Exception):
    """An adapter's pattern is not a regular expression, or matches too slowly."""


class PeftConfig(BaseModel):
    """Fields of the configuration that affect the adapter's result.

    Paths are module paths of the model, such as ``model.layers.0.mlp.up_proj``. Patterns are matched without the GIL.
    Methods raise PatternRefused when matching has taken ``_MAX_MATCH_SECONDS`` in all.
    """

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    peft_type: Literal["LORA"]
    task_type: Literal["CAUSAL_LM"] | None = None
    base_model_name_or_path: str | None = None
    r: int = Field(default=8, ge=1, le=_MAX_RANK)
    lora_alpha: float = Field(default=8.0, allow_inf_nan=False)
    use_rslora: bool = False
    bias: Literal["none"] = "none"
    init_lora_weights: bool | str | None = True
    target_modules: list[str] | str
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    _left_seconds: float = PrivateAttr(default_factory=lambda: _MAX_MATCH_SECONDS)

    @field_validator("rank_pattern", "alpha_pattern", mode="before")
    @classmethod
    def _none_is_empty(cls, value: object) -> object:
        return {} if value is None else value

    def targets(self, path: str) -> bool:
        """True if the adapter changes the linear layer at ``path``."""
        if self.exclude_modules and self._matches(self.exclude_modules, path):
            return False
        if isinstance(self.target_modules, str):
            return self.target_modules.lower() == _ALL_LINEAR or self._matches(self.target_modules, path)
        return self._matches(self.target_modules, path) and self._in_layers(path)

    def rank(self, path: str) -> int:
        return self.rank_pattern.get(self._key(self.rank_pattern, path), self.r)

    def scale(self, path: str) -> float:
        """Factor by which the product of a layer's two matrices is multiplied."""
        alpha, rank = self.alpha_pattern.get(self._key(self.alpha_pattern, path), self.lora_alpha), self.rank(path)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _in_layers(self, path: str) -> bool:
        wanted = self.layers_to_transform
        if wanted is None or wanted == []:
            return True
        patterns = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern or []
        found = [self._match(rf"(?:^|.*?\.){p}\.(\d+)\..*", path) for p in patterns if p] or [_LAYER.match(path)]
        number = next((int(match[1]) for match in found if match), None)
        return number == wanted if isinstance(wanted, int) else number in wanted

    def _matches(self, wanted: list[str] | str, path: str) -> bool:
        """True if a path matches: a regular expression must match the whole path, a listed name the path or its end."""
        if isinstance(wanted, str):
            return self._match(wanted, path) is not None
        return any(path == name or path.endswith(f".{name}") for name in wanted)

    def _key(self, patterns: dict[str, Any], path: str) -> str:
        """First pattern that matches the end of a path; empty if no pattern matches."""
        return next((pattern for pattern in patterns if self._match(rf"(.*\.)?({pattern})", path)), "")

    def _match(self, expression: str, path: str) -> Any:
        """Match a whole path within the remaining time; None for no match."""
        began = time.monotonic()
        try:
            return regex.fullmatch(expression, path, timeout=max(self._left_seconds, 1e-3), concurrent=True)
        except TimeoutError as error:
            raise PatternRefused(
                f"has the pattern {expression!r}, and matching its patterns takes more than {_MAX_MATCH_SECONDS:g} s; "
                "name the layers in a list, or write a pattern without a repetition inside of a repetition"
            ) from error
        except regex.error as error:
            raise PatternRefused(f"has {expression!r}, which is no regular expression: {error}") from error
        finally:
            self._left_seconds -= time.monotonic() - began


def read_peft_config(file: Path) -> PeftConfig:
    """Read an ``adapter_config.json``. Raises ConfigurationError in one sentence for unsupported settings."""
    try:
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"cannot read {file}: {error}") from error
    if not isinstance(read, dict):
        raise ConfigurationError(f"{file} is no JSON object; it must be what PEFT's save_pretrained wrote")
    for name, why in _REFUSED.items():
        if read.get(name):
            raise ConfigurationError(f"{file} sets {name}: {why}, which is not supported")
    try:
        settings = PeftConfig.model_validate(read)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "missing":
            raise ConfigurationError(f"{file} has no {name}; it must be what PEFT's save_pretrained wrote") from error
        why = first["msg"][0].lower() + first["msg"][1:]
        raise ConfigurationError(f"{file} says {name} is {read.get(name)!r}: {why}") from error
    _check(file, settings)
    return settings


def _check(file: Path, settings: PeftConfig) -> None:
    if settings.init_lora_weights not in _SUPPORTED_INITS:
        raise ConfigurationError(
            f"{file} says init_lora_weights is {settings.init_lora_weights!r}, which changes the model's own weights "
            "too; save it as plain LoRA (save_pretrained with path_initial_model_for_weight_conversion)"
        )
    for name, value in (settings.model_extra or {}).items():
        if value and name not in _WITHOUT_EFFECT and name not in _REFUSED:
            raise ConfigurationError(f"{file} sets {name}, which is not known here, so that its answers may be wrong")
    ranks = [*settings.rank_pattern.values()]
    if any(not 1 <= rank <= _MAX_RANK for rank in ranks):
        raise ConfigurationError(f"{file} has ranks {ranks} in rank_pattern; allowed are 1 to {_MAX_RANK}")
    if not all(map(math.isfinite, settings.alpha_pattern.values())):
        raise ConfigurationError(f"{file} has an alpha in alpha_pattern that is no finite number")
    given: list[Any] = [settings.target_modules, settings.exclude_modules]
    expressions = [one for one in given if isinstance(one, str)]
    expressions += [*settings.rank_pattern, *settings.alpha_pattern]
    patterns = settings.layers_pattern
    expressions += [patterns] if isinstance(patterns, str) else patterns or []
    if len(expressions) > _MAX_PATTERNS:
        raise ConfigurationError(f"{file} has {len(expressions)} patterns; at most {_MAX_PATTERNS} are allowed")
    for expression in expressions:
        if len(expression) > _MAX_PATTERN_LENGTH:
            raise ConfigurationError(
                f"{file} has a pattern of {len(expression)} characters; at most {_MAX_PATTERN_LENGTH} are allowed"
            )
        try:
            regex.compile(expression)
        except regex.error as error:
            raise ConfigurationError(f"{file} has {expression!r}, which is no regular expression: {error}") from error
