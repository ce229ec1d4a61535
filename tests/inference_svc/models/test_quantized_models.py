"""Models whose weights are quantized when they are loaded: near the truth, the same in every batch, refused by name."""

from __future__ import annotations

import pytest
import torch
from kvkernels.cpu import cpu_library, quantized_gemm
from kvsidecar.errors import ConfigurationError
from torch import Tensor, nn

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models import fused_layer_weights
from inference_svc.models.linear import quantized_linear
from inference_svc.models.linear.quantized_linear import QuantizedLinear, pick_weight_bits
from inference_svc.models.loader import LoadedModel, load

IDS = list(range(10, 110))
CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(quantized_gemm.kernel() is None, reason="no CPU kernels run here")


def pool_of(loaded: LoadedModel) -> KVPool:
    return KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 512, loaded.dtype, CPU)


def forward(decoder: Decoder, pool: KVPool, *spans: forward_batch.SequenceSlice) -> Tensor:
    return decoder(forward_batch.build_batch(list(spans), pool, CPU))


def logits(loaded: LoadedModel) -> Tensor:
    pool = pool_of(loaded)
    table = pool.allocate(len(IDS))
    assert table is not None
    return forward(Decoder(loaded), pool, forward_batch.SequenceSlice(IDS, 0, table, True))[0]


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_and_head_are_quantized_and_near(dtype: str) -> None:
    want = logits(load("demo", device="cpu", dtype="float32"))
    whole = load("demo", device="cpu", dtype=dtype)
    identities = {whole.weights}
    rounding = (logits(whole).float() - want).norm()  # of bfloat16: .029 to .045 of the norm, by the CPU
    for bits, bound in ((8, 0.04), (4, 0.4)):
        loaded = load("demo", device="cpu", dtype=dtype, weights=bits)
        layers = {name: m for name, m in loaded.model.named_modules() if isinstance(m, QuantizedLinear)}
        assert len(layers) == 7 * loaded.layers + 1
        assert {m.quantized.bits for name, m in layers.items() if name != "lm_head"} == {bits}
        assert layers["lm_head"].quantized.bits == 8
        assert fused_layer_weights.can_fuse_model(loaded.model)
        assert (logits(loaded).float() - want).norm() < rounding + bound * want.norm()
        identities.add(loaded.weights)
    assert len(identities) == 3, "their keys and values are not each other's"


@needs_kernels
@pytest.mark.parametrize("one_by_one", [False, True])
def test_any_split_of_a_prompt_gives_the_same_bits(one_by_one: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused, and by the model's own layers."""
    if one_by_one:
        monkeypatch.setattr(fused_layer_weights, "can_fuse_model", lambda model: False)
    loaded = load("demo", device="cpu", weights=4)
    decoder, pool = Decoder(loaded), pool_of(loaded)
    whole, pieces, neighbour = (pool.allocate(n) for n in (100, 100, 4))
    assert whole is not None
    assert pieces is not None
    assert neighbour is not None
    want, got, at = forward(decoder, pool, forward_batch.SequenceSlice(IDS, 0, whole, True))[0], torch.empty(0), 0
    for n in (1, 30, 2, 65, 1, 1):
        beside = forward_batch.SequenceSlice([7], 3, neighbour, True)
        got = forward(decoder, pool, beside, forward_batch.SequenceSlice(IDS[at : at + n], at, pieces, True))[1]
        at += n
    assert torch.equal(got, want)
    for values in (pool.keys, pool.values):
        assert torch.equal(values[:, :, pieces.slots(0, 100)], values[:, :, whole.slots(0, 100)])


@needs_kernels
def test_layers_that_do_not_fit_together_run_one_by_one() -> None:
    """As where a checkpoint's makers left some of them at 16 bits."""
    loaded, mixed = (load("demo", device="cpu", dtype="float32", weights=8) for _ in range(2))
    attention = mixed.model.model.layers[1].self_attn  # type: ignore[union-attr, index]
    plain = nn.Linear(attention.v_proj.in_features, attention.v_proj.out_features)
    plain.weight.data, plain.bias.data = quantized_gemm.dequantize(attention.v_proj.quantized), attention.v_proj._bias
    attention.v_proj = plain
    assert not fused_layer_weights.can_fuse_model(mixed.model)
    got, want = logits(mixed), logits(loaded)
    assert (got - want).norm() < 0.06 * want.norm(), "each is .03 beside the truth"


@needs_kernels
def test_what_the_kernel_does_not_take_stays_as_it_is() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good, self.odd, self.gate = nn.Linear(96, 32), nn.Linear(96, 40), nn.Linear(96, 16)

    model = Model()
    x = torch.randn(3, 2, 96)
    want = model.good(x)
    assert quantized_linear.quantize_linears(model, 8) == 1
    assert (model.good(x) - want).norm() < 0.02 * want.norm()
    assert isinstance(model.odd, nn.Linear)
    assert isinstance(model.gate, nn.Linear), "it chooses among experts"


def test_what_cannot_be_had_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="weights is 8, but the checkpoint has 4 bits; allowed are auto, 4"):
        pick_weight_bits(8, 4, CPU)
    with pytest.raises(ConfigurationError, match="weights is 4, and device cuda:0 quantizes no weights"):
        pick_weight_bits(4, 16, torch.device("cuda:0"))
    assert pick_weight_bits("auto", 4, torch.device("cuda:0")) == 4
    monkeypatch.setattr(quantized_gemm, "kernel", lambda: None)
    none = cpu_library.LoadedLibrary(None, "there are no CPU kernels for this machine")
    monkeypatch.setattr(quantized_linear, "loaded_library", lambda: none)
    with pytest.raises(
        ConfigurationError, match="weights is 4, but there are no CPU kernels for this machine; allowed"
    ):
        pick_weight_bits(4, 16, CPU)
    assert pick_weight_bits("auto", 4, CPU) == 16, "written out"
    assert pick_weight_bits("auto", 16, CPU) == 16
