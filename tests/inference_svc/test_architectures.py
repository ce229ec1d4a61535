"""Every supported architecture: packed rows, chunked prefill and scattered recompute equal the eager model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as t
from kvsidecar.errors import ModelUnsupported

from inference_svc.engine import rows
from inference_svc.engine.attention import ATTENTION, register
from inference_svc.engine.forward import Decoder
from inference_svc.engine.pool import KVPool
from inference_svc.model.architectures import REFUSED, SUPPORTED, check_architecture
from inference_svc.model.loader import LoadedModel

COMMON = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 1024,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "LlamaForCausalLM": (t.LlamaConfig, {"rope_parameters": LLAMA3}),
    "MistralForCausalLM": (t.MistralConfig, {"sliding_window": 16}),
    "Qwen2ForCausalLM": (t.Qwen2Config, {}),
    "Qwen3ForCausalLM": (t.Qwen3Config, {"head_dim": 32}),
    "Phi3ForCausalLM": (t.Phi3Config, {"pad_token_id": 0}),
    "GemmaForCausalLM": (t.GemmaConfig, {"head_dim": 16}),
    "Gemma2ForCausalLM": (t.Gemma2Config, {"head_dim": 16, "sliding_window": 16}),
    "StableLmForCausalLM": (t.StableLmConfig, {}),
    "Olmo2ForCausalLM": (t.Olmo2Config, {}),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> tuple[LoadedModel, Any, KVPool]:
    """A random model behind the engine, and its eager twin."""
    register()
    torch.manual_seed(0)
    kind, extra = CASES[name]
    config = kind(**COMMON, **extra)
    eager = t.AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval().to(dtype)
    for parameter_name, p in eager.named_parameters():  # norms of one would hide a forgotten weight
        if p.dim() == 1:
            torch.nn.init.normal_(p, 0.0 if parameter_name.endswith("bias") else 1.0, 0.1)
    model = t.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval().to(dtype)
    model.load_state_dict(eager.state_dict())
    model.requires_grad_(False)
    loaded = LoadedModel("x", model, None, config, name, b"", torch.device("cpu"), dtype, 1024, frozenset())  # type: ignore[arg-type]
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 2048, dtype, loaded.device)
    return loaded, eager, pool


def test_the_table_is_what_is_tested() -> None:
    assert set(CASES) == set(SUPPORTED)


@pytest.mark.parametrize("name", SUPPORTED)
def test_rows_equal_the_eager_model(name: str) -> None:
    loaded, eager, pool = build(name)
    decoder = Decoder(loaded)
    a, b = torch.randint(0, 500, (90,)), torch.randint(0, 500, (25,))
    with torch.inference_mode():
        want_a, want_b = eager(a[None]).logits[0], eager(b[None]).logits[0]

    def forward(*spans: rows.Span) -> torch.Tensor:
        return decoder(rows.build(list(spans), pool, loaded.device))

    ta, tb = pool.allocate(90), pool.allocate(25)
    assert ta is not None
    assert tb is not None
    ids_a, ids_b = a.tolist(), b.tolist()
    first = forward(rows.Span(ids_a[:30], 0, ta, True), rows.Span(ids_b, 0, tb, True))
    torch.testing.assert_close(first[0], want_a[29], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(first[1], want_b[24], atol=1e-5, rtol=1e-4)
    second = forward(rows.Span(ids_a[30:89], 30, ta, True))
    torch.testing.assert_close(second[0], want_a[88], atol=1e-5, rtol=1e-4)
    third = forward(rows.Span(ids_a[89:], 89, ta, True))
    torch.testing.assert_close(third[0], want_a[89], atol=1e-5, rtol=1e-4)
    # Recomputing scattered tokens in place changes nothing.
    slots = ta.slots(0, 90)
    before = pool.keys[:, :, slots].clone()
    again = forward(*(rows.Span(ids_a[i : i + 1], i, ta, True) for i in (5, 17, 33)))
    torch.testing.assert_close(again, want_a[[5, 17, 33]], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(pool.keys[:, :, slots], before, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(REFUSED))
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
