"""Rows of two adapters and of the model in one forward: each as by itself, to the bit, and as with merged weights."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kvkernels.cpu import quantized_gemm

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.lora.lora_adapter import LoraAdapter
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models import fused_layer_weights
from inference_svc.models.layer_streaming.residency_plan import StreamingOptions
from inference_svc.models.linear.quantized_linear import QuantizedLinear
from inference_svc.models.loader import LoadedModel, load
from inference_svc.models.supported_architectures import SUPPORTED
from tests.inference_svc.lora.random_adapters import ALL, ATTENTION_ONLY, RANK, adapter, linears, merge, tensors, write
from tests.inference_svc.models.test_architectures import build

PROMPTS = [[(7 * i + 3 * n) % 500 for i in range(50 + 9 * n)] for n in range(4)]
PIECES = ((0, 13), (13, 30), (30, 31), (31, 32))


def folders(at: Path, loaded: LoadedModel) -> list[Path]:
    """One over all linear layers, one over some of those that are computed together."""
    layers = linears(loaded)
    some = [name for name in ALL if name not in ("k_proj", "gate_proj")]
    return [write(at / "a", tensors(layers, 1)), write(at / "b", tensors(layers, 2, some))]


def run(
    decoder: Decoder, pool: KVPool, prompts: list[list[int]], adapters: list[LoraAdapter | None]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Reads all prompts together, in pieces: of each the logits after each piece, and its keys and values."""
    tables = [pool.allocate(len(prompt)) for prompt in prompts]
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start, end in (*PIECES, (32, 50)):
        spans = [
            forward_batch.SequenceSlice(prompt[start:end], start, table, True, adapter=one)  # type: ignore[arg-type]
            for prompt, table, one in zip(prompts, tables, adapters, strict=True)
        ]
        for found, row in zip(
            logits, decoder(forward_batch.build_batch(spans, pool, torch.device("cpu"))), strict=True
        ):
            found.append(row.clone())
    kept = []
    for table in tables:
        assert table is not None
        slots = table.slots(0, 50)
        kept.append(torch.stack((pool.keys[:, :, slots], pool.values[:, :, slots])))
        pool.free(table)
    return [torch.stack(found) for found in logits], kept


@pytest.mark.parametrize("name", SUPPORTED)
def test_each_is_as_with_merged_weights_and_as_alone(name: str, tmp_path: Path) -> None:
    loaded, eager, pool = build(name)
    places = folders(tmp_path, loaded)
    decoder = Decoder(loaded)
    a, b = (decoder.adopt(adapter(place, loaded)) for place in places)
    order = [a, None, b, a]  # rows of one adapter lie apart
    together, kept = run(decoder, pool, PROMPTS, order)
    for n, one in enumerate(order):
        alone, alone_kept = run(decoder, pool, PROMPTS[n : n + 1], [one])
        assert torch.equal(alone[0], together[n])
        assert torch.equal(alone_kept[0], kept[n])
    ends = [end - 1 for _, end in (*PIECES, (32, 50))]
    for n, place in ((1, None), (3, places[0]), (2, places[1])):
        twin, prompt = copy.deepcopy(eager), torch.tensor(PROMPTS[n][:50])[None]
        with torch.inference_mode():
            base = twin(prompt).logits[0, ends]
            want = base if place is None else merge(twin, place)(prompt).logits[0, ends]
        torch.testing.assert_close(together[n], want, atol=3e-5, rtol=1e-4)
        assert place is None or (want - base).norm() > 0.1 * base.norm()


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM"])
def test_in_bfloat16_too(name: str, tmp_path: Path) -> None:
    loaded, eager, pool = build(name, torch.bfloat16)
    places = folders(tmp_path, loaded)
    decoder = Decoder(loaded)
    a, b = (decoder.adopt(adapter(place, loaded)) for place in places)
    together, kept = run(decoder, pool, PROMPTS, [b, a, None, b])
    for n, one in enumerate((b, a, None, b)):
        alone, alone_kept = run(decoder, pool, PROMPTS[n : n + 1], [one])
        assert torch.equal(alone[0], together[n])
        assert torch.equal(alone_kept[0], kept[n])
    plain = eager.float()
    with torch.inference_mode():
        prompt = torch.tensor(PROMPTS[1][:50])[None]
        base, want = plain(prompt).logits[0, -1], merge(plain, places[0])(prompt).logits[0, -1]
    assert (together[1][-1].float() - want).norm() < 0.05 * want.norm() < 0.5 * (base - want).norm()


def test_fused_layers_and_the_models_own_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for suits in (fused_layer_weights.can_fuse_model, lambda model: False):
        monkeypatch.setattr(fused_layer_weights, "can_fuse_model", suits)
        loaded, _, pool = build("Qwen3ForCausalLM")
        decoder = Decoder(loaded)
        a, b = (decoder.adopt(adapter(place, loaded)) for place in folders(tmp_path, loaded))
        found.append(run(decoder, pool, PROMPTS, [a, None, b, b])[0])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=3e-5, rtol=1e-4)


def test_the_last_layer_of_rows_that_want_nothing_is_cut_with_the_adapters_rows(tmp_path: Path) -> None:
    loaded, _, pool = build("LlamaForCausalLM")
    decoder = Decoder(loaded)
    a, b = (decoder.adopt(adapter(place, loaded)) for place in folders(tmp_path, loaded))
    tables = [pool.allocate(64) for _ in range(3)]
    spans = [
        forward_batch.SequenceSlice(PROMPTS[n][:40], 0, table, True, adapter=one)  # type: ignore[arg-type]
        for n, (table, one) in enumerate(zip(tables, (a, None, b), strict=True))
    ]
    batch = forward_batch.build_batch(spans, pool, loaded.device)
    every = replace(batch, logit_rows=torch.arange(120), wanted=120)
    assert torch.equal(decoder(batch), decoder(every)[[39, 79, 119]])


@pytest.mark.skipif(quantized_gemm.kernel() is None, reason="no CPU kernels run here")
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_weights_at_any_width_and_streamed_ones_carry_adapters(
    bits: int, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed or not, the bits are the same. The adapter's part is not quantized: it is as if merged into the weights
    that quantizing leaves, but for the rows, which become bytes on the way."""

    def computed(stream: StreamingOptions, one_by_one: bool = False) -> list[torch.Tensor]:
        with monkeypatch.context() as patch:
            if one_by_one:
                patch.setattr(fused_layer_weights, "can_fuse_model", lambda model: False)
                patch.setattr(fused_layer_weights, "can_fuse", lambda layer, config: False)
            loaded = load("demo", device="cpu", dtype="float32", weights=bits, stream=stream)
            pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 512, loaded.dtype, loaded.device)
            decoder = Decoder(loaded)
            place = write(tmp_path / "a", tensors(linears(loaded), 1), lora_alpha=6.0 * RANK)
            one = decoder.adopt(adapter(place, loaded))
            found = run(decoder, pool, [PROMPTS[0], *[PROMPTS[1]] * 2], [None, one, None])[0]
            if loaded.streamed is not None:
                loaded.streamed.close()
            return found

    resident = computed(StreamingOptions())
    streamed = computed(StreamingOptions("full_stream", poison_freed_slots=True))
    assert all(torch.equal(a, b) for a, b in zip(resident, streamed, strict=True))
    own, low = (load("demo", device="cpu", dtype="float32", weights=width) for width in (16, bits))
    for path, module in low.model.named_modules():
        if isinstance(module, QuantizedLinear):
            own.model.get_submodule(path).weight = torch.nn.Parameter(
                quantized_gemm.dequantize(module.quantized), False
            )
    pool = KVPool(own.layers, own.kv_heads, own.head_dim, 512, own.dtype, own.device)
    decoder = Decoder(replace(own, model=merge(own.model, tmp_path / "a", 6.0)))
    want = run(decoder, pool, [PROMPTS[1]], [None])[0][0][-1]
    changed = (resident[2][-1] - want).norm()  # what the adapter makes of it
    assert changed > 0.2 * want.norm()
    assert (resident[1][-1] - want).norm() < (1e-3 if bits == 16 else 0.5) * changed
    if bits == 8:
        assert (computed(StreamingOptions(), one_by_one=True)[1] - resident[1]).norm() < 0.05 * resident[1].norm()


def test_attention_of_models_with_experts_takes_adapters(tmp_path: Path) -> None:
    loaded, eager, pool = build("MixtralForCausalLM")
    place = write(tmp_path / "a", tensors(linears(loaded), 5, ATTENTION_ONLY), target_modules="all-linear")
    decoder = Decoder(loaded)
    got = run(decoder, pool, PROMPTS[:1], [decoder.adopt(adapter(place, loaded))])[0][0][-1]
    with torch.inference_mode():
        want = merge(eager, place)(torch.tensor(PROMPTS[0])[None]).logits[0, -1]
    torch.testing.assert_close(got, want, atol=3e-5, rtol=1e-4)
