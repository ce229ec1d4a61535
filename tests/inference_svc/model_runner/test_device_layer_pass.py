"""Fused layers of a device, whose kernels the emulator runs, against the models' own layers."""

from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.cuda_attention import CudaAttention
from inference_svc.model_runner.cuda_graphs import CudaGraphs
from inference_svc.model_runner.decoder import Decoder
from inference_svc.model_runner.forward_batch import Branch, SequenceSlice
from inference_svc.models import fused_layer_weights
from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.loader import LoadedModel
from tests.inference_svc.model_runner import test_cuda_attention
from tests.inference_svc.model_runner.test_cuda_graphs import Replaying
from tests.kvkernels.emulated.conftest import Emulated, library

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 300, "hidden_size": 128}
CONFIGS = {
    "Qwen2ForCausalLM": t.Qwen2Config(num_hidden_layers=2, intermediate_size=192, **SIZES),
    "Qwen3ForCausalLM": t.Qwen3Config(num_hidden_layers=2, intermediate_size=128, **SIZES),
    "LlamaForCausalLM": t.LlamaConfig(num_hidden_layers=2, intermediate_size=128, **SIZES),
    "MistralForCausalLM": t.MistralConfig(num_hidden_layers=2, intermediate_size=128, sliding_window=40, **SIZES),
}


@pytest.fixture(scope="module")
def emulated() -> Emulated:
    return library()


def decoder_of(name: str, kernels: Emulated | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Decoder, LoadedModel]:
    """Return the decoder that a device with these kernels has; without kernels, that of the model's own layers."""
    monkeypatch.setitem(test_cuda_attention.CONFIGS, name, CONFIGS[name])
    monkeypatch.setattr(fused_layer_weights, "can_fuse_model", lambda model: False)
    monkeypatch.setattr("inference_svc.model_runner.decoder.ops.find_kernels", lambda device, dtype: kernels)
    model = test_cuda_attention.loaded(name)
    for parameter in model.model.parameters():  # norms other than 1, and biases other than 0
        if parameter.dim() == 1:
            parameter.data += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) / 4
    return Decoder(model), model


def pool_of(model: LoadedModel, kernels: Emulated | None) -> KVPool:
    pool = KVPool(model.layers, model.kv_heads, model.head_dim, 1024, torch.bfloat16, model.device)
    pool.native = CudaAttention(kernels) if kernels is not None else None
    return pool


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 0.03 * want.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_layers_give_the_models_logits(emulated: Emulated, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own, model = decoder_of(name, None, monkeypatch)
    want = test_cuda_attention.logits(own, model, None)
    fused, model = decoder_of(name, emulated, monkeypatch)
    assert fused._fused is not None
    assert_close(test_cuda_attention.logits(fused, model, emulated), want)


def prompt(count: int) -> list[int]:
    return torch.randint(0, 300, (count,), generator=torch.Generator().manual_seed(7)).tolist()


def computed_parts(kernels: Emulated | None, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Compute draft branches, a projection, a part of the layers, and the rest of them."""
    decoder, model = decoder_of("Qwen3ForCausalLM", kernels, monkeypatch)
    pool, ids = pool_of(model, kernels), prompt(90)
    table, copy = pool.allocate(128), pool.allocate(128)
    assert table is not None
    assert copy is not None

    def batch(span: SequenceSlice) -> Any:
        return forward_batch.build_batch([span], pool, model.device)

    decoder(batch(SequenceSlice(ids[:60], 0, table, False)))
    decoder(batch(SequenceSlice(ids[:60], 0, copy, False)))
    out, slot = {}, int(copy.slots(60, 61)[0])
    branch = Branch(ids[70:72], 61, 0, 2, copy, ((0, slot),))
    out["branches"] = decoder(batch(SequenceSlice(ids[60:62], 60, table, True, num_drafted=1, branches=(branch,))))
    later = batch(SequenceSlice(ids[62:75], 62, table, True))
    hidden = decoder.embed(later)
    decoder.project(hidden.clone(), later, 0)
    out["projected keys"] = pool.keys[0][:, later.slots[:13]].clone()
    out["projected values"] = pool.values[0][:, later.slots[:13]].clone()
    hidden = decoder.advance(hidden, later, 0, 1)
    out["after a layer"] = hidden[:13].clone()
    out["normalized"] = decoder.normalize(hidden[:12])
    out["rest"] = decoder.resume(hidden, later, 1)
    out["no logits"] = decoder(batch(SequenceSlice(ids[75:80], 75, table, False)))
    out["keys"] = pool.keys[:, :, torch.from_numpy(table.slots(0, 80))].clone()
    return out


def test_parts_of_a_forward_are_those_of_the_models_layers(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    want, got = computed_parts(None, monkeypatch), computed_parts(emulated, monkeypatch)
    for name, tensor in want.items():
        if tensor.numel():
            assert_close(got[name].float(), tensor.float())
        else:
            assert not got[name].numel()


def test_a_layers_trace_shows_every_result(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, model = decoder_of("Qwen3ForCausalLM", emulated, monkeypatch)
    pool = pool_of(model, emulated)
    table = pool.allocate(32)
    assert table is not None
    batch = forward_batch.build_batch([SequenceSlice(prompt(5), 0, table, True)], pool, model.device)
    seen: list[tuple[int, ...]] = []
    decoder.trace(decoder.embed(batch), batch, 0, lambda made: seen.append(tuple(made.shape)))
    qkv, normed = (5, (4 + 2 * 2) * 64), (5, 128)
    assert seen == [normed, qkv, (5, 4, 64), (5, 4, 64), normed, normed, (5, 2 * 128), (5, 128), normed]


def test_a_layer_is_fourteen_launches_or_fewer(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts PyTorch's operations that launch kernels, and ours, of a decode step of two sequences."""
    from torch.utils._python_dispatch import TorchDispatchMode

    decoder, model = decoder_of("Qwen2ForCausalLM", emulated, monkeypatch)
    pool = pool_of(model, emulated)
    tables = [pool.allocate(64) for _ in range(2)]
    launched: list[str] = []
    views = {"view", "slice", "select", "t", "transpose", "unsqueeze", "empty", "new_empty", "empty_like", "detach"}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name.removeprefix("aten::")
            if name.removeprefix("_").removesuffix("_unsafe") not in views:
                launched.append(name)
            return func(*args, **(kwargs or {}))

    def counted(end: int) -> int:
        spans = [SequenceSlice([5], 0, table, True) for table in tables if table is not None]
        batch = forward_batch.build_batch(spans, pool, model.device)
        hidden = decoder.embed(batch)
        assert batch.pool.native is not None
        batch.index = None
        launched.clear()
        with Counting(), torch.inference_mode():
            assert decoder._fused is not None
            decoder._fused.run(hidden, batch, 0, end)
        return len(launched)

    launch = emulated.launch
    monkeypatch.setattr(emulated, "launch", lambda name, *more: (launched.append(name), launch(name, *more))[1])
    monkeypatch.setattr(PackedLinear, "forward", PackedLinear.by_onednn)  # as on a device, PyTorch computes products
    one, two = counted(1), counted(2)
    assert two - one <= 14, launched
    assert two - one >= 9, "a count that misses launches proves nothing"


def test_recorded_steps_equal_eager_ones(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, model = decoder_of("Qwen3ForCausalLM", emulated, monkeypatch)
    pool, lengths = pool_of(model, emulated), (5, 70, 33)
    tables = [pool.allocate(100) for _ in lengths]
    for table, length in zip(tables, lengths, strict=True):
        assert table is not None
        decoder(forward_batch.build_batch([SequenceSlice(prompt(length), 0, table, True)], pool, model.device))
    graphs = CudaGraphs(decoder, pool, Replaying(), 8)
    for chosen in ((1,), (0, 1, 2), (2, 0, 1)):
        spans = [SequenceSlice([7 + i], lengths[i], tables[i], True) for i in chosen]  # type: ignore[arg-type]
        eager = decoder(forward_batch.build_batch(spans, pool, model.device)).clone()
        recorded = graphs(spans)
        assert recorded is not None
        assert_close(recorded.float(), eager.float())


@pytest.mark.parametrize(
    ("changed", "fused"),
    [({}, True), ({"hidden_act": "gelu"}, False), ({"intermediate_size": 132}, False), ({"head_dim": 66}, False)],
)
def test_which_models_are_fused_on_a_device(changed: dict[str, Any], fused: bool) -> None:
    values = {"num_hidden_layers": 1, "intermediate_size": 128, **SIZES, **changed}
    model = t.AutoModelForCausalLM.from_config(t.Qwen3Config(**values)).to(torch.bfloat16)
    assert fused_layer_weights.can_fuse_model_on_device(model) is fused
    assert not fused_layer_weights.can_fuse_model_on_device(model.float())


def test_an_unknown_structure_keeps_its_layers() -> None:
    gemma = t.Gemma2Config(num_hidden_layers=1, intermediate_size=128, **SIZES)
    assert not fused_layer_weights.can_fuse_model_on_device(t.AutoModelForCausalLM.from_config(gemma).bfloat16())
