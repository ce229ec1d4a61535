"""The engine over our CUDA kernels, run by the emulator, equals the engine over torch's attention."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
import torch
import transformers as t
from kvkernels.cuda.cuda_library import KernelLaunchError

from inference_svc.kv_pool.block_table import UNMAPPED, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import cuda_attention, forward_batch
from inference_svc.model_runner.attention import register
from inference_svc.model_runner.cuda_attention import CudaAttention, select_cuda_attention
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


@pytest.mark.parametrize("torch_is_faster", [True, False])
def test_torch_serves_where_it_is_faster(
    emulated: Emulated, monkeypatch: pytest.MonkeyPatch, torch_is_faster: bool
) -> None:
    """The test sets the times: on a busy machine, even an emulator may seem to be faster."""
    pool = KVPool(1, 2, 64, 1024, torch.bfloat16, torch.device("cpu"))
    before, now = pool.free_pages, [0.0]

    def slow(*_: Any) -> None:
        now[0] += 2.0 if torch_is_faster else 0.5

    def torchs(*_: Any) -> None:
        now[0] += 1.0

    monkeypatch.setattr(cuda_attention.CudaAttention, "__call__", slow)
    monkeypatch.setattr(cuda_attention, "attend_segments", torchs)
    monkeypatch.setattr(cuda_attention, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    kinds = select_cuda_attention(pool, emulated, heads=4, keys=256).kinds
    assert kinds == (frozenset() if torch_is_faster else {"decode", "prefill", "scattered"})
    assert pool.free_pages == before


def test_a_kernel_that_cannot_be_launched_is_left_to_torch(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a kernel once ended the start of the worker."""
    pool, now = KVPool(1, 2, 64, 1024, torch.bfloat16, torch.device("cpu")), [0.0]

    class SmallCard:
        """Attention that refuses a decode step."""

        def launch(self, name: str, grid: Any, threads: int, shared_bytes: int, params: Any, stream: int) -> None:
            if getattr(params, "rows", 0) == 1:
                raise KernelLaunchError(f"{name}: too many resources requested for launch")
            emulated.launch(name, grid, threads, shared_bytes, params, stream)

        def has(self, *_: object) -> bool:
            return True

    def torchs(*_: Any) -> None:
        now[0] += 1.0

    monkeypatch.setattr(cuda_attention, "attend_segments", torchs)
    monkeypatch.setattr(cuda_attention, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    with structlog.testing.capture_logs() as logs:
        assert select_cuda_attention(pool, SmallCard(), heads=4, keys=64).kinds == {"prefill", "scattered"}
    assert [(line["kind"], "too many resources" in line["reason"]) for line in logs] == [("decode", True)]
