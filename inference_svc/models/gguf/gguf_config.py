"""Builds transformers configurations from GGUF metadata.

Some facts are in llama.cpp's code and not in the file, such as the windowed layers of Gemma and the scaling of its
scores; this module adds them. Other values are stored as tensors (frequencies of LongRoPE and Llama 3); this module
reads these tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from kvsidecar.errors import ModelUnsupported
from numpy.typing import NDArray
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from inference_svc.models.gguf.gguf_file import GgufFile
from inference_svc.models.pretrained_files import BAD_SETTINGS, one_line

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_DEFAULT_THETA, _GEMMA3_LOCAL_THETA, _GEMMA3_PATTERN = 10_000.0, 10_000.0, 6
# Constants of Llama 3's RoPE scaling: two bounds, and the original context. A file contains only the scaling's result.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Gemma models with this number of layers scale scores by model width per head instead of by head dimension.
_WIDTH_SCALED = {"gemma2": 46, "gemma3": 62}


@dataclass(frozen=True)
class GgufArchitecture:
    """A GGUF architecture's names in transformers."""

    model_type: str
    class_name: str


ARCHITECTURES = {
    "llama": GgufArchitecture("llama", "LlamaForCausalLM"),  # Mistral's files also say llama
    "qwen2": GgufArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("qwen3", "Qwen3ForCausalLM"),
    "phi3": GgufArchitecture("phi3", "Phi3ForCausalLM"),
    "gemma2": GgufArchitecture("gemma2", "Gemma2ForCausalLM"),
    "gemma3": GgufArchitecture("gemma3_text", "Gemma3ForCausalLM"),
}


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """Look up a file's architecture. Raises ModelUnsupported for an unsupported architecture."""
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        raise ModelUnsupported(
            f"{file.path} holds a model of the architecture {file.architecture!r}; supported in GGUF are "
            f"{', '.join(ARCHITECTURES)}"
        )
    if file.get("expert_count"):
        raise ModelUnsupported(f"{file.path} holds a mixture of {file.get('expert_count')} experts, which only models "
                               "in safetensors may be")  # fmt: skip
    return found


def config_of(file: GgufFile) -> Any:
    """Build the configuration. Raises ModelUnsupported for missing or unsupported metadata."""
    kind = architecture_of(file)
    try:
        return AutoConfig.for_model(kind.model_type, **_settings(file, kind))
    except BAD_SETTINGS as error:
        raise ModelUnsupported(
            f"{file.path} describes no model that transformers can build: {one_line(error)}"
        ) from error


def _settings(file: GgufFile, kind: GgufArchitecture) -> dict[str, Any]:
    heads, width = _number(file, "attention.head_count"), _number(file, "embedding_length")
    if "token_embd.weight" not in file.tensors:
        raise ModelUnsupported(f"{file.path} has no token_embd.weight: it holds no language model, or a part of one")
    rows = file.tensors["token_embd.weight"].shape[0]
    tokens = _special_tokens(file, rows)
    values: dict[str, Any] = {
        "architectures": [kind.class_name],
        "hidden_size": width,
        "intermediate_size": _number(file, "feed_forward_length"),
        "num_hidden_layers": _number(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _number(file, "attention.head_count_kv", heads),
        "head_dim": file.head_dim,
        "max_position_embeddings": _number(file, "context_length"),
        "rms_norm_eps": file.need("attention.layer_norm_rms_epsilon"),
        "vocab_size": rows,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, file.head_dim),
        **{name: tokens[key] for name, key in _TOKENS.items()},
    }
    return values | _OWN.get(file.architecture, _nothing)(file, values)


_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def _special_tokens(file: GgufFile, rows: int) -> dict[str, int | None]:
    """Ids of the special tokens, by their names in the file. Raises ModelUnsupported for ids without a token."""
    listed = file.metadata.get("tokenizer.ggml.tokens")  # the number of tokens
    last = min(rows, listed if isinstance(listed, int) else rows) - 1
    found = {}
    for name in (*_TOKENS.values(), "unknown"):
        key = f"tokenizer.ggml.{name}_token_id"
        found[name] = token = file.metadata.get(key)
        if token is not None and not (type(token) is int and 0 <= token <= last):
            raise ModelUnsupported(f"{file.path} has {key} {token!r}; allowed are 0 to {last}, the ids of its tokens")
    return found


def _number(file: GgufFile, key: str, default: int | None = None) -> int:
    found = file.need(key) if default is None else file.get(key, default)
    if not isinstance(found, int):
        raise ModelUnsupported(f"{file.path} has {key} {found!r}; allowed is one number for all layers")
    return found


def _nothing(file: GgufFile, values: dict[str, Any]) -> dict[str, Any]:
    return {}


def _llama(file: GgufFile, values: dict[str, Any]) -> dict[str, Any]:
    biased = "blk.0.attn_q.bias" in file.tensors
    return {"attention_bias": biased, "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}


def _phi3(file: GgufFile, values: dict[str, Any]) -> dict[str, Any]:
    original = file.get("rope.scaling.original_context_length", values["max_position_embeddings"])
    window = file.get("attention.sliding_window") or None  # llama.cpp writes 0 for a model without windows
    return {"sliding_window": window, "original_max_position_embeddings": original}


def _gemma(file: GgufFile, values: dict[str, Any]) -> dict[str, Any]:
    by_width = values["num_hidden_layers"] == _WIDTH_SCALED[file.architecture]
    scale = values["hidden_size"] // values["num_attention_heads"] if by_width else values["head_dim"]
    return {"sliding_window": file.need("attention.sliding_window"), "query_pre_attn_scalar": scale}


def _gemma2(file: GgufFile, values: dict[str, Any]) -> dict[str, Any]:
    caps = {n: file.get(n) for n in ("attn_logit_softcapping", "final_logit_softcapping") if file.get(n)}
    return _gemma(file, values) | caps


def _gemma3(file: GgufFile, values: dict[str, Any]) -> dict[str, Any]:
    pattern = file.get("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    if isinstance(pattern, int):
        pattern = [bool((i + 1) % pattern) for i in range(values["num_hidden_layers"])]
    local = {"rope_type": "default", "rope_theta": file.get("rope.freq_base_swa", _GEMMA3_LOCAL_THETA)}
    return _gemma(file, values) | {
        "layer_types": ["sliding_attention" if local_ else "full_attention" for local_ in pattern],
        "rope_parameters": {"full_attention": values["rope_parameters"], "sliding_attention": local},
        "final_logit_softcapping": file.get("final_logit_softcapping"),
    }


_OWN = {"llama": _llama, "phi3": _phi3, "gemma2": _gemma2, "gemma3": _gemma3}


# ---- rotary embeddings ----------------------------------------------------------------------------------------


def _rope(file: GgufFile, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": file.get("rope.freq_base", _DEFAULT_THETA)}
    turned = file.get("rope.dimension_count") or head_dim
    if turned != head_dim:
        rope["partial_rotary_factor"] = turned / head_dim
    kind, factor = file.get("rope.scaling.type", "none"), file.get("rope.scaling.factor")
    if file.get("rope.scale_linear"):
        kind, factor = "linear", file.get("rope.scale_linear")
    longrope = "rope_factors_long.weight" in file.tensors
    if longrope or kind == "longrope":
        return rope | _longrope(file)
    if "rope_freqs.weight" in file.tensors:
        return rope | _llama3(file, turned, rope["rope_theta"])
    if kind == "linear" and factor and factor != 1.0:
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor:
        return rope | _yarn(file, factor)
    if kind not in ("none", "linear", "yarn"):
        raise ModelUnsupported(f"{file.path} scales RoPE by {kind!r}; allowed are none, linear, yarn and longrope")
    return rope


def _yarn(file: GgufFile, factor: float) -> dict[str, Any]:
    length = _number(file, "context_length")
    rope = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.get("rope.scaling.original_context_length") or int(length / factor),
    }
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if file.get(f"rope.scaling.{key}") is not None:
            rope[name] = file.get(f"rope.scaling.{key}")
    if file.get("rope.scaling.attn_factor") is not None:  # in addition to YaRN's own factor
        rope["attention_factor"] = file.get("rope.scaling.attn_factor") * (0.1 * math.log(factor) + 1.0)
    return rope


def _longrope(file: GgufFile) -> dict[str, Any]:
    rope = {
        "rope_type": "longrope",
        "long_factor": _floats(file, "rope_factors_long.weight").tolist(),
        "short_factor": _floats(file, "rope_factors_short.weight").tolist(),
        "original_max_position_embeddings": file.need("rope.scaling.original_context_length"),
    }
    if file.get("rope.scaling.attn_factor") is not None:
        rope["attention_factor"] = file.get("rope.scaling.attn_factor")
    return rope


def _llama3(file: GgufFile, turned: int, theta: float) -> dict[str, Any]:
    """Recover Llama 3's scaling from its frequency divisors. Raises ModelUnsupported for other divisors."""
    divisors = _floats(file, "rope_freqs.weight")
    if len(divisors) != turned // 2:
        raise ModelUnsupported(f"{file.path} has {len(divisors)} rope_freqs for {turned} rotated channels")
    if np.allclose(divisors, 1.0):
        return {}
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": float(divisors.max())} | _LLAMA3
    like = LlamaConfig(head_dim=turned, rope_parameters=dict(rope))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](like, torch.device("cpu"))
    plain = theta ** -(np.arange(0, turned, 2) / turned)
    if not np.allclose(plain / scaled.double().numpy(), divisors, rtol=1e-3):
        raise ModelUnsupported(f"{file.path} has rope_freqs that are not those of Llama 3's scaling")
    return rope


def _floats(file: GgufFile, name: str) -> NDArray[np.float32]:
    tensor = file.tensors.get(name)
    if tensor is None or tensor.kind.name != "F32":
        raise ModelUnsupported(f"{file.path} has no {name} in F32, which its RoPE scaling needs")
    return file.packed(tensor).view(np.float32).reshape(-1)
