"""Every supported architecture: packed rows, chunked prefill and scattered recompute equal the eager model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as t
from kvsidecar.errors import ModelUnsupported

from inference_svc.context_reuse.rope_shift import rope_shift_of, why_not_shiftable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.attention import register
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.architectures import check_architecture
from inference_svc.models.attention_windows import ATTENTION_NAME
from inference_svc.models.loader import LoadedModel
from inference_svc.models.mixture_of_experts import EXPERTS, register_experts
from inference_svc.models.rope_scaling import freeze_longrope
from inference_svc.models.supported_architectures import SUPPORTED, UNSUPPORTED

COMMON = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 1024,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
GEMMA3_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "LlamaForCausalLM": (t.LlamaConfig, {"rope_parameters": LLAMA3}),
    "MistralForCausalLM": (t.MistralConfig, {"sliding_window": 16}),
    "Qwen2ForCausalLM": (t.Qwen2Config, {}),
    "Qwen3ForCausalLM": (t.Qwen3Config, {"head_dim": 32}),
    "Qwen3MoeForCausalLM": (
        t.Qwen3MoeConfig,
        {"head_dim": 32, "moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2,
         "norm_topk_prob": True},
    ),
    "MixtralForCausalLM": (t.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}),
    "Phi3ForCausalLM": (t.Phi3Config, {"pad_token_id": 0}),
    "GemmaForCausalLM": (t.GemmaConfig, {"head_dim": 16}),
    "Gemma2ForCausalLM": (t.Gemma2Config, {"head_dim": 16, "sliding_window": 16}),
    "Gemma3ForCausalLM": (
        t.Gemma3TextConfig,
        {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 24, "layer_types": GEMMA3_LAYERS,
         "rope_parameters": GEMMA3_ROPE},
    ),
    "StableLmForCausalLM": (t.StableLmConfig, {}),
    "Olmo2ForCausalLM": (t.Olmo2Config, {}),
}  # fmt: skip


def build(
    name: str, dtype: torch.dtype = torch.float32, served: int = COMMON["max_position_embeddings"], **changes: Any
) -> tuple[LoadedModel, Any, KVPool]:
    """A random model behind the engine, and its eager twin."""
    register()
    register_experts()
    torch.manual_seed(0)
    kind, extra = CASES[name]
    config = kind(**COMMON | extra | changes)
    eager = t.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", experts_implementation="eager"
    )
    eager = eager.eval().to(dtype)
    for parameter_name, p in eager.named_parameters():  # norms of one would hide a forgotten weight
        if p.dim() == 1:
            torch.nn.init.normal_(p, 0.0 if parameter_name.endswith("bias") else 1.0, 0.1)
    model = t.AutoModelForCausalLM.from_config(
        config, attn_implementation=ATTENTION_NAME, experts_implementation=EXPERTS
    )
    model = model.eval().to(dtype)
    model.load_state_dict(eager.state_dict())
    model.requires_grad_(False)
    factors = freeze_longrope(model, served)
    place = torch.device("cpu")
    loaded = LoadedModel("x", model, None, model.config, name, b"", place, dtype, served, frozenset(), factors)  # type: ignore[arg-type]
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 2048, dtype, loaded.device)
    return loaded, eager, pool


def test_the_table_is_what_is_tested() -> None:
    assert set(CASES) == set(SUPPORTED)


@pytest.mark.parametrize("name", SUPPORTED)
def test_rows_equal_the_eager_model(name: str) -> None:
    agree(*build(name))


def agree(loaded: LoadedModel, eager: Any, pool: KVPool) -> None:
    """Asserts that packed rows, chunked prefill and scattered recompute give the eager model's logits."""
    decoder = Decoder(loaded)
    a, b = torch.randint(0, 500, (90,)), torch.randint(0, 500, (25,))
    with torch.inference_mode():
        want_a, want_b = eager(a[None]).logits[0], eager(b[None]).logits[0]

    def forward(*spans: forward_batch.SequenceSlice) -> torch.Tensor:
        return decoder(forward_batch.build_batch(list(spans), pool, loaded.device))

    ta, tb = pool.allocate(90), pool.allocate(25)
    assert ta is not None
    assert tb is not None
    ids_a, ids_b = a.tolist(), b.tolist()
    first = forward(
        forward_batch.SequenceSlice(ids_a[:30], 0, ta, True), forward_batch.SequenceSlice(ids_b, 0, tb, True)
    )
    torch.testing.assert_close(first[0], want_a[29], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(first[1], want_b[24], atol=1e-5, rtol=1e-4)
    second = forward(forward_batch.SequenceSlice(ids_a[30:89], 30, ta, True))
    torch.testing.assert_close(second[0], want_a[88], atol=1e-5, rtol=1e-4)
    third = forward(forward_batch.SequenceSlice(ids_a[89:], 89, ta, True))
    torch.testing.assert_close(third[0], want_a[89], atol=1e-5, rtol=1e-4)
    # Recomputing scattered tokens in place changes nothing.
    slots = ta.slots(0, 90)
    before = pool.keys[:, :, slots].clone()
    again = forward(*(forward_batch.SequenceSlice(ids_a[i : i + 1], i, ta, True) for i in (5, 17, 33)))
    torch.testing.assert_close(again, want_a[[5, 17, 33]], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(pool.keys[:, :, slots], before, atol=1e-5, rtol=1e-4)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32,
            "short_factor": [1.0 + i / 20 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}  # fmt: skip
PHI3 = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("rope", [LLAMA3, YARN, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}])
def test_scaled_rope_equals_the_eager_model(name: str, rope: dict[str, Any]) -> None:
    agree(*build(name, rope_parameters=dict(rope)))


def test_scaled_rope_is_in_the_name_of_the_chunks() -> None:
    ropes = [LLAMA3, YARN, YARN | {"factor": 2.0}, YARN | {"rope_theta": 2e4}]
    names = {build("LlamaForCausalLM", rope_parameters=dict(r))[0].descriptor(16).SerializeToString() for r in ropes}
    assert len(names) == len(ropes)


def test_longrope_within_its_original_context_equals_the_eager_model() -> None:
    loaded, eager, pool = build("Phi3ForCausalLM", served=32, **PHI3)
    assert loaded.rope_factors == "short"
    prompt = torch.randint(0, 500, (32,))
    close(loaded, eager, pool, prompt, [7, 20, 32])


def test_longrope_beyond_its_original_context_equals_the_eager_model() -> None:
    loaded, eager, pool = build("Phi3ForCausalLM", **PHI3)
    assert loaded.rope_factors == "long"
    close(loaded, eager, pool, torch.randint(0, 500, (90,)), [20, 50, 90])  # the first piece would fit the short set


def close(loaded: LoadedModel, eager: Any, pool: KVPool, prompt: torch.Tensor, ends: list[int]) -> None:
    """Asserts that a prompt read in pieces has the eager model's last logits, whatever else is in the batch."""
    decoder, table, beside = Decoder(loaded), pool.allocate(len(prompt)), pool.allocate(64)
    assert table is not None
    assert beside is not None
    with torch.inference_mode():
        want = eager(prompt[None]).logits[0, -1]
    start = 0
    for end in ends:
        spans = [
            forward_batch.SequenceSlice(prompt[start:end].tolist(), start, table, True),
            forward_batch.SequenceSlice([1] * (end // 2), 0, beside, True),
        ]
        got = decoder(forward_batch.build_batch(spans, pool, loaded.device))[0]
        start = end
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_which_angles_a_longrope_model_uses_is_in_the_name_of_its_chunks() -> None:
    short, long = (build("Phi3ForCausalLM", served=served, **PHI3)[0] for served in (32, 1024))
    assert short.descriptor(16) != long.descriptor(16)


def test_gemma_3_has_both_bases_in_the_name_of_its_chunks() -> None:
    rope = build("Gemma3ForCausalLM")[0].descriptor(16).rope_parameters
    assert "1000000.0" in rope
    assert "10000.0" in rope


def test_keys_turned_by_different_angles_per_layer_are_not_moved() -> None:
    loaded, _, _ = build("Gemma3ForCausalLM")
    assert "different rotary embeddings" in why_not_shiftable(loaded.config)
    with pytest.raises(ModelUnsupported, match="cannot be moved"):
        rope_shift_of(loaded.model)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_refused_architectures_say_why(name: str) -> None:
    for strict in (True, False):
        with pytest.raises(ModelUnsupported, match=name):
            check_architecture(name, t.LlamaConfig(), strict)


def test_strict_decides_about_unverified_ones() -> None:
    with pytest.raises(ModelUnsupported, match="not been verified"):
        check_architecture("CohereForCausalLM", t.LlamaConfig())
    check_architecture("CohereForCausalLM", t.LlamaConfig(), strict=False)


def test_rope_that_depends_on_length_is_refused() -> None:
    config = t.LlamaConfig(**COMMON, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ModelUnsupported, match="dynamic"):
        check_architecture("LlamaForCausalLM", config)


@pytest.mark.parametrize(
    "config",
    [t.GraniteConfig(embedding_multiplier=12.0), t.GraniteConfig(logits_scaling=8.0), t.CohereConfig(logit_scale=0.06)],
)
def test_scales_outside_of_the_layers_are_refused_also_of_unverified_models(config: t.PretrainedConfig) -> None:
    """Only the layers, the norm and the head are called: Granite's tokens were wrong."""
    check_architecture("GraniteForCausalLM", t.GraniteConfig(), strict=False)
    with pytest.raises(ModelUnsupported, match="outside of its layers"):
        check_architecture("GraniteForCausalLM", config, strict=False)


def test_models_that_look_ahead_are_refused() -> None:
    config = t.Gemma3TextConfig(**COMMON, use_bidirectional_attention=True)
    with pytest.raises(ModelUnsupported, match="both directions"):
        check_architecture("Gemma3ForCausalLM", config)
