"""The engine over our CUDA kernels, run by the emulator, equals the engine over torch's attention."""

from typing import Any

import numpy as np
import pytest
import structlog
import torch
import torch.nn.functional as F
import transformers as t
from kvkernels.cuda.cuda_library import KernelLaunchError

from inference_svc.kv_pool.block_table import UNMAPPED, BlockTable
from inference_svc.kv_pool.host_overflow import HostOverflow
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import cuda_attention, forward_batch
from inference_svc.model_runner.attention import attend_segments, register
from inference_svc.model_runner.cuda_attention import CudaAttention, make_cuda_attention
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.attention_windows import ATTENTION_NAME
from inference_svc.models.loader import LoadedModel
from tests.kvkernels.emulated.conftest import Emulated, library

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 300, "hidden_size": 128}
CONFIGS = {
    "Qwen3ForCausalLM": t.Qwen3Config(num_hidden_layers=2, intermediate_size=128, **SIZES),
    # A soft cap on scores, and a window in every other layer.
    "Gemma2ForCausalLM": t.Gemma2Config(num_hidden_layers=2, intermediate_size=128, sliding_window=16, **SIZES),
    "MistralForCausalLM": t.MistralConfig(num_hidden_layers=2, intermediate_size=128, sliding_window=40, **SIZES),
}


@pytest.fixture(scope="module")
def emulated() -> Emulated:
    return library()


def loaded(name: str) -> LoadedModel:
    register()
    torch.manual_seed(0)
    model = (
        t.AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=ATTENTION_NAME).eval().to(torch.bfloat16)
    )
    model.requires_grad_(False)
    cpu = torch.device("cpu")
    return LoadedModel("x", model, None, CONFIGS[name], name, b"", cpu, torch.bfloat16, 1024, frozenset())  # type: ignore[arg-type]


def logits(decoder: Decoder, model: LoadedModel, kernels: Emulated | None) -> torch.Tensor:
    """Ragged prefill, a second piece, decode of two sequences, one of them in several pieces, and scattered rows."""
    pool = KVPool(model.layers, model.kv_heads, model.head_dim, 1024, torch.bfloat16, model.device)
    pool.native = CudaAttention(kernels) if kernels is not None else None
    whole = pool.allocate(120)
    assert whole is not None
    scattered = BlockTable([(20, 1), (12, 1), (16, 2)])
    ids = torch.randint(0, 300, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    out = []
    for spans in (
        [
            forward_batch.SequenceSlice(ids[:70], 0, whole, True),
            forward_batch.SequenceSlice(ids[100:150], 0, scattered, True),
        ],
        [forward_batch.SequenceSlice(ids[70:90], 70, whole, True)],
        [
            forward_batch.SequenceSlice(ids[90:91], 90, whole, True),
            forward_batch.SequenceSlice(ids[150:151], 50, scattered, True),
        ],
        [forward_batch.SequenceSlice([ids[i] for i in (3, 40, 77, 90)], 0, whole, True, np.asarray([3, 40, 77, 90]))],
    ):
        out.append(decoder(forward_batch.build_batch(spans, pool, model.device)).float())
    return torch.cat(out)


@pytest.mark.parametrize("name", CONFIGS)
def test_both_attentions_give_the_same_logits(emulated: Emulated, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The CPU's fused layers have an attention of their own; what runs here is what a CUDA device runs.
    monkeypatch.setattr("inference_svc.models.fused_layer_weights.can_fuse_model", lambda model: False)
    model = loaded(name)
    decoder = Decoder(model)
    ours, torch_s = logits(decoder, model, emulated), logits(decoder, model, None)
    assert (ours - torch_s).abs().max() <= 0.02 * torch_s.abs().max()
    assert torch.equal(ours.argmax(-1), torch_s.argmax(-1))


@pytest.mark.parametrize("pages", [[(0, 4)], [(5, 1), (2, 2), (7, 1)]])
def test_what_a_window_has_left_is_not_read(
    emulated: Emulated, pages: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one piece the first token would lie before the pool; in several its place is nowhere."""
    monkeypatch.setattr("inference_svc.models.fused_layer_weights.can_fuse_model", lambda model: False)
    model = loaded("MistralForCausalLM")
    decoder, ids = Decoder(model), torch.randint(0, 300, (201,), generator=torch.Generator().manual_seed(2)).tolist()

    def pool() -> KVPool:
        shape = model.layers, model.kv_heads, model.head_dim
        made = KVPool(*shape, 512, torch.bfloat16, model.device, model.windows)
        made.native = CudaAttention(emulated)
        return made

    whole, part = pool(), pool()
    table, left = whole.allocate(256), BlockTable([(UNMAPPED, 4), *pages], first_valid_token=128)
    assert table is not None
    decoder(forward_batch.build_batch([forward_batch.SequenceSlice(ids[:200], 0, table, True)], whole, model.device))
    for mine, theirs in ((whole.keys, part.keys), (whole.values, part.values)):
        theirs[:, :, : theirs.shape[2] - 512] = float("nan")
        theirs[:, :, torch.from_numpy(left.slots(128, 256))] = mine[:, :, torch.from_numpy(table.slots(128, 256))]
    assert whole.first_visible(200) == 128
    want, got = (
        decoder(forward_batch.build_batch([forward_batch.SequenceSlice(ids[200:], 200, at, True)], there, model.device))
        for at, there in ((table, whole), (left, part))
    )
    assert torch.equal(want, got)


def by_mask(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Stands for a GPU's library."""
    rows, count = query.shape[2], keys.shape[2]
    mask = torch.ones(rows, count, dtype=torch.bool).tril(count - rows)
    return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=True)


def test_a_library_computes_long_parts_of_prompts(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "LIBRARY_ROWS", 40)
    calls: list[tuple[int, int]] = []

    def library(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        calls.append((query.shape[2], keys.shape[2]))
        return by_mask(query, keys, values, scale)

    pool = KVPool(1, 2, 64, 1024, torch.bfloat16, torch.device("cpu"))
    pool.keys.normal_(), pool.values.normal_()
    before, random_state = pool.free_pages, torch.get_rng_state()
    made = make_cuda_attention(pool, emulated, heads=4, library=library, keys=64)
    assert torch.equal(torch.get_rng_state(), random_state), "the check draws its own numbers, the same at each start"
    assert made.kinds == {"decode", "prefill", "scattered"}
    assert pool.free_pages == before
    calls.clear()
    tables = [pool.allocate(120) for _ in range(2)]

    def computed(attention: CudaAttention, *lengths: tuple[int, int], window: int | None = None) -> torch.Tensor:
        spans = [
            forward_batch.SequenceSlice([0] * count, start, table, False)
            for (start, count), table in zip(lengths, tables, strict=False)
            if table is not None
        ]
        batch = forward_batch.build_batch(spans, pool, pool.keys.device)
        query = torch.randn(len(batch.tokens), 4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
        return attention(query, batch, 0, 0.125, window, None)[: batch.real].float()

    ours = CudaAttention(emulated)
    for lengths in (((30, 50), (0, 41)), ((0, 45),)):
        got = computed(made, *lengths)
        assert calls == [(count, start + count) for start, count in lengths]
        calls.clear()
        assert (got - computed(ours, *lengths)).abs().max() < 0.03
    for lengths in (((30, 50), (0, 3)), ((60, 1),)):
        assert torch.equal(computed(made, *lengths), computed(ours, *lengths))
    assert torch.equal(computed(made, (30, 50), window=20), computed(ours, (30, 50), window=20))
    assert not calls


def test_a_library_with_other_results_is_not_used(emulated: Emulated) -> None:
    pool = KVPool(1, 2, 64, 1024, torch.bfloat16, torch.device("cpu"))

    def not_causal(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=True)

    def nothing(query: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.full_like(query, float("nan"))

    def refusing(*_: object) -> torch.Tensor:
        raise RuntimeError("No available kernel. Aborting execution.")

    for way, used in ((by_mask, True), (not_causal, False), (nothing, False), (refusing, False)):
        assert (make_cuda_attention(pool, emulated, 4, way, 64).library is not None) is used, way


def test_a_kernel_that_cannot_be_launched_is_left_to_torch(emulated: Emulated) -> None:
    """Such a kernel once ended the start of the worker."""
    pool = KVPool(1, 2, 64, 1024, torch.bfloat16, torch.device("cpu"))

    class SmallCard:
        """Attention that refuses a decode step."""

        def launch(self, name: str, grid: Any, threads: int, shared_bytes: int, params: Any, stream: int) -> None:
            if getattr(params, "rows", 0) == 1:
                raise KernelLaunchError(f"{name}: too many resources requested for launch")
            emulated.launch(name, grid, threads, shared_bytes, params, stream)

        def has(self, *_: object) -> bool:
            return True

    with structlog.testing.capture_logs() as logs:
        assert make_cuda_attention(pool, SmallCard(), heads=4, keys=64).kinds == {"prefill", "scattered"}
    assert [(line["kind"], "too many resources" in line["reason"]) for line in logs] == [("decode", True)]


@pytest.mark.parametrize("by_library", [False, True])
def test_a_batch_with_contexts_on_the_host_is_computed_in_parts(
    emulated: Emulated, by_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of prompts and decode rows, in the pool and on the host. Only prompts on the host are copied."""
    monkeypatch.setattr(cuda_attention, "LIBRARY_ROWS", 1 if by_library else 1000)
    if not by_library:
        monkeypatch.setattr(forward_batch, "SEGMENT_ROWS", 16)  # a sequence's keys are copied once for all its segments
    seen: list[bool] = []

    def library(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        seen.append(keys.is_contiguous() and values.is_contiguous())
        return by_mask(query, keys, values, scale)

    def extended(strips: int, own: int, beyond: int) -> torch.Tensor:
        return torch.empty(strips, own + beyond, dtype=torch.uint8)

    overflow = HostOverflow(extended, 1, 2, 64, 512, 1024, torch.bfloat16)
    pool = KVPool(1, 2, 64, 512, torch.bfloat16, torch.device("cpu"), (), overflow)
    pool.keys.normal_(), pool.values.normal_()
    attention = CudaAttention(emulated, library=library if by_library else None)
    places = [(pool.allocate, 20), (pool.allocate_overflow, 30), (pool.allocate, 1), (pool.allocate_overflow, 1)]
    tables = [(allocate(100), rows) for allocate, rows in places]
    spans = [
        forward_batch.SequenceSlice([0] * rows, 100 - rows, table, False) for table, rows in tables if table is not None
    ]
    query = torch.randn(52, 4, 64).bfloat16()
    batch = forward_batch.build_batch(spans, pool, pool.keys.device)
    got = attention(query, batch, 0, 0.125, None, None)
    parts = query.split([20, 30, 1, 1])
    alone = [forward_batch.build_batch([span], pool, pool.keys.device) for span in spans]
    padded = [F.pad(part, (0, 0, 0, 0, 0, -len(part) % 4)) for part in parts]
    computed = zip(padded, alone, parts, strict=True)
    want = torch.cat([attend_segments(rows, one, 0, 0.125, None, None)[: len(part)] for rows, one, part in computed])
    assert (got - want).abs().max() < 0.02 * want.abs().max()
    if by_library:
        assert seen == [False, True, False, False]
        return
    first = pool.first_overflow_slot
    assert [(one.first_row, one.copied) for one in batch.index] == [
        (0, None),
        (20, slice(first, first + 100)),
        (50, None),
    ]
