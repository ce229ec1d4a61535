"""Names of supported architectures, and reasons for unsupported ones. Imports no torch."""

from __future__ import annotations

from kvsidecar.errors import ModelUnsupported

# Verified against the eager model by tests/inference_svc/models/test_architectures.py.
SUPPORTED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "StableLmForCausalLM",
    "Olmo2ForCausalLM",
)

_ALIBI = "ALiBi adds a bias by distance to attention scores, which the attention kernels do not have"
_LEARNED = "positions are learned embeddings added to the input, so that stored keys cannot be used elsewhere"
_STATE = "layers carry a recurrent state that cannot be cut into chunks of tokens"
_ENCODER = "it has an encoder; only decoder-only models have a prefix to reuse"
_LATENT = "its cache holds compressed latents instead of keys and values per head"

UNSUPPORTED: dict[str, str] = {
    "BloomForCausalLM": _ALIBI,
    "MptForCausalLM": _ALIBI,
    "FalconForCausalLM": "some of its checkpoints use ALiBi, and its attention does not take an interface",
    "GPT2LMHeadModel": _LEARNED,
    "GPTNeoForCausalLM": _LEARNED,
    "GPTBigCodeForCausalLM": _LEARNED,
    "OPTForCausalLM": _LEARNED,
    "XGLMForCausalLM": _LEARNED,
    "MambaForCausalLM": _STATE,
    "Mamba2ForCausalLM": _STATE,
    "RwkvForCausalLM": _STATE,
    "JambaForCausalLM": _STATE,
    "RecurrentGemmaForCausalLM": _STATE,
    "T5ForConditionalGeneration": _ENCODER,
    "BartForConditionalGeneration": _ENCODER,
    "Gemma3ForConditionalGeneration": "it has an image encoder; its text model alone (Gemma3ForCausalLM) is supported",
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
}


def check_name(name: str, strict: bool = True) -> None:
    """Raise ModelUnsupported with the reason. Without ``strict``, unverified architectures pass."""
    if name in UNSUPPORTED:
        raise ModelUnsupported(f"{name} is not supported: {UNSUPPORTED[name]}")
    if strict and name not in SUPPORTED:
        raise ModelUnsupported(
            f"{name} has not been verified against its eager model; verified are {', '.join(SUPPORTED)}; "
            "--strict false tries it all the same"
        )
