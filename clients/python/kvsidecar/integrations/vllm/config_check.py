"""Checks vLLM's configuration at startup, and refuses unsupported settings by name."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvsidecar.errors import ConfigurationError

# Methods that propose draft tokens from the text itself. Other methods have a draft model with its own KV cache.
_PROPOSERS_WITHOUT_CACHE = ("ngram", "ngram_gpu", "suffix")


def check_config(config: Any, caches: Any) -> None:
    """Refuse a vLLM configuration whose chunks would be incomplete.

    ``config`` is a ``VllmConfig``, ``caches`` a ``KVCacheConfig``. Raises ConfigurationError.
    """
    groups = caches.kv_cache_groups
    kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
    if len(groups) != 1 or kinds != [FullAttentionSpec.__name__]:
        raise ConfigurationError(
            f"{config.model_config.model} has {len(groups)} KV cache group(s) of {', '.join(kinds)}; "
            f"KVSidecar keeps models with one group of {FullAttentionSpec.__name__}"
        )
    spec = groups[0].kv_cache_spec
    if config.cache_config.cache_dtype not in ("auto", "float32", "float16", "bfloat16"):
        raise ConfigurationError(
            f"kv_cache_dtype is {config.cache_config.cache_dtype}; KVSidecar keeps unquantized caches: leave it "
            'at auto, and set "bits" to 8 or 4 in kv_connector_extra_config to store less'
        )
    if spec.head_size != spec.head_size_v or spec.tokens_per_state != 1:
        raise ConfigurationError(
            f"keys have {spec.head_size} channels and values {spec.head_size_v}; KVSidecar keeps those with the same"
        )
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise ConfigurationError(
                f"{name} is {getattr(parallel, name)}; KVSidecar keeps the caches of engines with 1"
            )
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in _PROPOSERS_WITHOUT_CACHE:
        raise ConfigurationError(
            f"speculative decoding by {speculative.method} has a KV cache of its own; allowed are "
            f"{', '.join(_PROPOSERS_WITHOUT_CACHE)}"
        )
