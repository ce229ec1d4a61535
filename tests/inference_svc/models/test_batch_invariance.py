"""A row's result does not depend on what is computed with it: the ground that exact reuse stands on."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from kvkernels.cpu import bf16_gemv, cpu_attention, f32_gemm

from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import cpu_graph, forward_batch
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.linear.plain_linear import PlainLinear, in_float32
from inference_svc.models.linear.quantized_linear import quantize_linears
from inference_svc.models.loader import load
from inference_svc.models.supported_architectures import SUPPORTED
from tests.inference_svc.models.test_architectures import build

BF16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.skipif(not BF16, reason="this CPU has no native bfloat16")
@pytest.mark.parametrize(("features", "outputs"), [(64, 128), (192, 512), (896, 1152)])
def test_packed_products_equal_plain_ones_at_every_row_count(features: int, outputs: int) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(features, outputs, dtype=torch.bfloat16)
    packed = PackedLinear(linear.weight, linear.bias)
    x = torch.randn(130, features).bfloat16()
    with torch.inference_mode():
        whole = linear(x)
        for n in [*range(1, 35), 64, 100, 130]:
            assert torch.equal(packed(x[:n].contiguous()), whole[:n]), f"{n} rows"


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kernel", "seed"), [("ours", 0), ("ours", 1), ("ours", 2), ("torch's", 0)])
def test_any_split_of_a_prompt_gives_the_same_bits(
    name: str, dtype: torch.dtype, kernel: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel != "ours":
        monkeypatch.setattr(cpu_attention, "serves", lambda dtype, dim: False)
    rng = random.Random(seed)
    loaded, _, pool = build(name, dtype)
    decoder = Decoder(loaded)
    length = rng.randint(530, 700)  # more than one block of keys
    ids = [rng.randrange(500) for _ in range(length)]

    def forward(*spans: forward_batch.SequenceSlice) -> torch.Tensor:
        return decoder(forward_batch.build_batch(list(spans), pool, loaded.device))

    one = pool.allocate(length)
    assert one is not None
    want = forward(forward_batch.SequenceSlice(ids, 0, one, True))[0]
    other = _scattered(pool, 320)
    # The same prompt in pieces, over scattered pages, with decoding rows of another sequence beside it.
    neighbour, at = _scattered(pool, 32), 0
    short, got = ids[:320], torch.empty(0)
    check = pool.allocate(320)
    assert check is not None
    want_short = forward(forward_batch.SequenceSlice(short, 0, check, True))[0]
    while at < len(short):
        n = min(rng.choice([1, 1, 2, 3, 7, 31, 64, 65, 130]), len(short) - at)
        beside = forward_batch.SequenceSlice([rng.randrange(500)], rng.randrange(30), neighbour, True)
        got = forward(beside, forward_batch.SequenceSlice(short[at : at + n], at, other, True))[1]
        at += n
    assert torch.equal(got, want_short)
    for values in (pool.keys, pool.values):
        assert torch.equal(values[:, :, other.slots(0, 320)], values[:, :, check.slots(0, 320)])
        assert torch.equal(values[:, :, one.slots(0, 320)], values[:, :, check.slots(0, 320)])
    # Decoding the long one's last token again gives its logits again.
    assert torch.equal(forward(forward_batch.SequenceSlice(ids[-1:], length - 1, one, True))[0], want)


def _scattered(pool: KVPool, tokens: int) -> BlockTable:
    """A table whose pages do not lie in one piece."""
    table = BlockTable()
    spacers = []
    for _ in range(-(-tokens // 32)):
        part, spacer = pool.allocate(32), pool.allocate(1)
        assert part is not None
        assert spacer is not None
        table.ranges += part.ranges
        spacers.append(spacer)
    for spacer in spacers:
        pool.free(spacer)
    return table


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [[], [39], [3, 17, 39, 41], list(range(0, 100, 5))])
def test_rows_that_want_nothing_change_nothing(name: str, dtype: torch.dtype, wanted: list[int]) -> None:
    # The last layer is computed for the others only.
    loaded, _, pool = build(name, dtype)
    decoder = Decoder(loaded)
    one, other = pool.allocate(200), _scattered(pool, 80)
    assert one is not None
    rng = random.Random(5)
    first, second = ([rng.randrange(500) for _ in range(n)] for n in (160, 60))
    decoder(forward_batch.build_batch([forward_batch.SequenceSlice(first[:120], 0, one, False)], pool, loaded.device))
    spans = [
        forward_batch.SequenceSlice(first[120:], 120, one, True),
        forward_batch.SequenceSlice(second, 0, other, True),
    ]

    def forward(chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        for table, start, end in ((one, 120, 160), (other, 0, 60)):
            pool.keys[:, :, table.slots(start, end)] = 0
        padded = torch.tensor([*chosen, *[0] * (-len(chosen) % 4)], dtype=torch.int64)
        batch = replace(forward_batch.build_batch(spans, pool, loaded.device), logit_rows=padded, wanted=len(chosen))
        logits = decoder(batch)
        return logits, pool.keys[:, :, one.slots(120, 160)].clone(), pool.keys[:, :, other.slots(0, 60)].clone()

    every, *keys = forward(list(range(100)))
    some, *same_keys = forward(wanted)
    assert all(torch.equal(a, b) for a, b in zip(keys, same_keys, strict=True))
    assert torch.equal(some, every[wanted]) if wanted else not some.numel()


@pytest.mark.skipif(BF16 and bf16_gemv.kernel() is None, reason="oneDNN computes bfloat16 here, and rounds")
@pytest.mark.parametrize("bits", [16, 8])
def test_logits_of_bfloat16_models_are_not_rounded(bits: int) -> None:
    """Rounded, the largest logits of a position are often equal, and the first token wins."""
    loaded = load("demo", dtype="bfloat16", weights=bits)
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 64, loaded.dtype, loaded.device)
    decoder, table = Decoder(loaded), pool.allocate(40)
    assert table is not None
    ids = [random.Random(1).randrange(500) for _ in range(40)]
    logits = decoder(forward_batch.build_batch([forward_batch.SequenceSlice(ids, 0, table, True)], pool, loaded.device))
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("features", "outputs"), [(64, 100), (896, 2500)])
def test_plain_products_in_float32_are_not_rounded(features: int, outputs: int, biased: bool) -> None:
    """CPUs without bfloat16 compute the logits of bfloat16 models in this way."""
    torch.manual_seed(outputs)
    weight, bias = torch.randn(outputs, features).bfloat16(), torch.randn(outputs).bfloat16() if biased else None
    layer, x = PlainLinear(weight, bias), torch.randn(68, features).bfloat16()
    whole = in_float32(layer, x)
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert whole.dtype == torch.float32
    assert (whole - exact).abs().max() < 1e-6 * features
    for rows in (4, 8, 12, 64):
        assert torch.equal(in_float32(layer, x[:rows].contiguous()), whole[:rows]), f"{rows} rows"


@dataclass
class _Seen:
    """An observer that keeps what it gets, layer by layer."""

    layers: list[torch.Tensor]

    def see(self, strongest: torch.Tensor) -> None:
        self.layers.append(strongest.clone())


@pytest.mark.parametrize("name", [name for name in SUPPORTED if name.startswith(("Llama", "Qwen3F"))])
@pytest.mark.parametrize("bits", [16, 8])
def test_a_pass_in_one_call_gives_the_bits_of_single_ones(
    name: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, _, pool = build(name, torch.float32)
    if bits == 8:
        quantize_linears(loaded.model, 8, shown=False)
    decoder, rng = Decoder(loaded), random.Random(5)
    tables = [_scattered(pool, 96) for _ in range(5)]
    found: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    few = cpu_graph.can_capture
    attention: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for at_once in (True, False):
        monkeypatch.setattr(cpu_graph, "can_capture", few if at_once else lambda batch, heads: False)
        rng.seed(5)
        for at, counts in ((0, (20,)), (0, (31, 1)), (31, (1, 1, 1, 1)), (32, (5, 1, 20)), (52, (1, 1))):
            spans = [
                forward_batch.SequenceSlice([rng.randrange(500) for _ in range(n)], at, table, True)
                for n, table in zip(counts, tables, strict=False)
            ]
            found[at_once].append(decoder(forward_batch.build_batch(spans, pool, loaded.device)).clone())
        for at, count in ((52, 22), (74, 3)):
            question = forward_batch.SequenceSlice([rng.randrange(500) for _ in range(count)], at, tables[0], False)
            seen = _Seen([])
            batch = replace(forward_batch.build_batch([question], pool, loaded.device), observer=seen)
            assert few(batch, decoder._fused.widths.heads if decoder._fused is not None else 0)
            decoder.resume(decoder.embed(batch), batch, 0)
            attention[at_once] += seen.layers
    assert [len(one) for one in attention.values()] == [2 * loaded.layers] * 2
    assert all(torch.equal(a, b) for a, b in zip(attention[True], attention[False], strict=True))
    assert not torch.equal(attention[True][0], attention[True][1]), "each layer has its own"
    assert all(torch.equal(a, b) for a, b in zip(found[True], found[False], strict=True))
    assert f32_gemm.kernel() is None or (decoder._fused is not None and decoder._fused._chains), "none was made"


@pytest.mark.skipif(f32_gemm.kernel() is None, reason="no variant of the kernels runs here")
@pytest.mark.parametrize("dtype", ["float32", *(["bfloat16"] if BF16 else [])])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_step_from_tokens_to_logits_in_one_call_has_the_bits_of_a_forward(dtype: str, bits: int) -> None:
    loaded = load("demo", dtype=dtype, weights=bits)
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 1024, loaded.dtype, loaded.device)
    decoder, rng = Decoder(loaded), random.Random(5)
    tables = [_scattered(pool, 40) for _ in range(5)]
    captured = 0
    for at, counts in ((0, (1, 1, 1, 1, 1)), (1, (1,)), (1, (3, 2)), (4, (1, 1))):
        spans = [
            forward_batch.SequenceSlice([rng.randrange(500) for _ in range(n)], at, table, True)
            for n, table in zip(counts, tables, strict=False)
        ]
        want = decoder(forward_batch.build_batch(spans, pool, loaded.device)).clone()
        logits = decoder.compute(spans, pool)
        assert torch.equal(logits, want)
        known = decoder.likeliest(logits)
        assert decoder.likeliest(logits.clone()) is None, "other logits"
        if known is not None:
            captured += 1
            assert known == (want.numpy().argmax(-1).tolist(), want.amax(-1).tolist())
    by_onednn = dtype == "bfloat16" and bits == 16 and bf16_gemv.kernel() is None
    assert captured == (0 if by_onednn else 3), "steps whose rows all need logits"


@pytest.mark.skipif(f32_gemm.kernel() is None, reason="no variant of the kernels runs here")
def test_two_pools_have_a_pass_of_their_own_and_take_it_along() -> None:
    loaded, _, pool = build("LlamaForCausalLM", torch.float32)
    decoder = Decoder(loaded)
    other: KVPool | None = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 256, loaded.dtype, loaded.device)

    def forward(where: KVPool) -> torch.Tensor:
        table = where.allocate(8)
        assert table is not None
        logits = decoder(
            forward_batch.build_batch([forward_batch.SequenceSlice([5, 6, 7], 0, table, True)], where, loaded.device)
        ).clone()
        where.free(table)
        return logits

    assert other is not None
    want = forward(pool)
    for where in (other, pool, other):
        assert torch.equal(forward(where), want)
    gone = weakref.ref(other)
    del where, other
    gc.collect()
    assert gone() is None, "a pool that nobody uses any more is given back"
    assert torch.equal(forward(pool), want)
