"""Invariants of reuse, over random models, chunkings, orders and shifts."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from hypothesis import given, settings
from hypothesis import strategies as st
from kvkernels import pack_chunk, unpack_chunk
from kvsidecar.chunk_layout import new_header
from kvsidecar.errors import ModelUnsupported

from benchmarks.repair_strategies import STRATEGIES, FirstK
from inference_svc.context_reuse.reuse_lab import ReuseLab
from inference_svc.context_reuse.reuse_plan import Positions, RelocatedSpan, ReusePlan
from inference_svc.context_reuse.rope_shift import rope_shift_of, why_not_shiftable
from inference_svc.context_reuse.selective_recompute import SelectiveRecompute
from inference_svc.context_reuse.selectors import SELECTORS, SelectionSignals
from inference_svc.context_reuse.selectors.salient import SalientSelector
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.loader import LoadedModel
from inference_svc.models.supported_architectures import SUPPORTED
from tests.inference_svc.models import test_architectures
from tests.inference_svc.models.test_architectures import CASES, build

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "yarn": (t.LlamaConfig, {"rope_parameters": YARN}),
    "linear": (t.Qwen2Config, {"rope_parameters": LINEAR}),
    "partial": (t.Phi3Config, {"pad_token_id": 0, "rope_parameters": PARTIAL}),
}
# The laboratory moves keys, which those of one model cannot be.
MOVABLE = [name for name in SUPPORTED if name != "Gemma3ForCausalLM"]
# Chunk lengths of a prompt, in some order.
CHUNKS = st.lists(st.integers(8, 40), min_size=2, max_size=5)


def random_model(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[LoadedModel, Any, KVPool]:
    if name in VARIANTS:
        monkeypatch.setitem(test_architectures.CASES, name, VARIANTS[name])
    return build(name)


def prefill(decoder: Decoder, pool: KVPool, ids: list[int], table: BlockTable) -> None:
    decoder(forward_batch.build_batch([forward_batch.SequenceSlice(ids, 0, table, False)], pool, torch.device("cpu")))


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("name", [*SUPPORTED, *VARIANTS])
def test_turning_stored_keys_equals_encoding_elsewhere(name: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers, against the eager model with shifted positions."""
    loaded, eager, pool = random_model(name, monkeypatch)
    if why_not_shiftable(loaded.config):
        with pytest.raises(ModelUnsupported, match="cannot be moved"):
            rope_shift_of(loaded.model)
        return
    decoder, rotary = Decoder(loaded), rope_shift_of(loaded.model)
    ids = torch.randint(1, 500, (24,)).tolist()
    table, moved = pool.allocate(24), pool.allocate(24)
    assert table is not None
    assert moved is not None
    prefill(decoder, pool, ids, table)
    header = new_header(loaded.geometry(bits), ids, 8)  # not the first tokens: all are quantized alike
    payload = memoryview(bytearray(header.payload_bytes))
    pack_chunk(pool.keys, pool.values, torch.from_numpy(table.slots(0, 24)), header, payload)
    for delta in (1, 100, 700, -3):
        where = torch.from_numpy(moved.slots(0, 24))
        unpack_chunk(pool.keys, pool.values, where, header, payload, rotary.by(delta))
        past = t.DynamicCache(config=eager.config)
        positions = torch.arange(24)[None] + delta + 3
        start = torch.arange(24)[None] + 3
        here = t.DynamicCache(config=eager.config)
        with torch.inference_mode():
            eager(torch.tensor([ids]), position_ids=positions, past_key_values=past, cache_position=torch.arange(24))
            eager(torch.tensor([ids]), position_ids=start, past_key_values=here, cache_position=torch.arange(24))
        for layer in range(loaded.layers):
            # The chunk was computed from position 0: the eager model says what the same shift does there.
            want = past.layers[layer].keys[0]
            base = here.layers[layer].keys[0]
            n = want.shape[1]  # sliding windows keep the last ones only
            got = pool.keys[layer].index_select(1, where)[:, -n:]
            turned = _turn(
                pool.keys[layer].index_select(1, torch.from_numpy(table.slots(0, 24)))[:, -n:], rotary.by(delta)
            )
            tolerance = 2e-4 if bits == 16 else 0.05 * float(want.abs().max())
            torch.testing.assert_close(got, turned, atol=tolerance, rtol=0)
            torch.testing.assert_close(_turn(base, rotary.by(delta)), want, atol=3e-4, rtol=0)


def _turn(keys: torch.Tensor, rotation: Any) -> torch.Tensor:
    from kvkernels.kv_pack_reference import rotate

    return rotate(keys, torch.from_numpy(rotation[0]), torch.from_numpy(rotation[1]))


@pytest.mark.parametrize(("kind", "why"), [("dynamic", "changes? with the length"), ("longrope", "longer than")])
def test_frequencies_that_depend_on_length_are_refused(kind: str, why: str) -> None:
    config = SimpleNamespace(rope_parameters={"rope_type": kind})
    assert why_not_shiftable(config)
    with pytest.raises(ModelUnsupported, match=why):
        rope_shift_of(SimpleNamespace(config=config))


@cache
def laboratory(name: str) -> ReuseLab:
    assert name in CASES
    return ReuseLab(build(name)[0], 1024)


@settings(max_examples=12, deadline=None)
@given(sizes=CHUNKS, data=st.data())
@pytest.mark.parametrize("name", MOVABLE)
def test_a_prefix_hit_has_the_logits_of_a_prefill(name: str, sizes: list[int], data: st.DataObject) -> None:
    lab = laboratory(name)
    ids = data.draw(st.lists(st.integers(1, 499), min_size=sum(sizes) + 5, max_size=sum(sizes) + 5))
    ends = np.cumsum(sizes).tolist()
    at = np.arange(ends[-1], len(ids))
    want = lab.full_prefill(ids, at)
    used = data.draw(st.integers(1, len(ends)))
    chunks = lab.store(ids[: ends[-1]], ends, 16)
    got = lab.reuse(ids, chunks[:used], [], STRATEGIES["none"], 0.0, at)
    torch.testing.assert_close(got.logits, want.logits, atol=2e-4, rtol=1e-4)
    if name in ("LlamaForCausalLM", "Qwen2ForCausalLM"):
        assert torch.equal(got.logits, want.logits)


@settings(max_examples=8, deadline=None)
@given(sizes=CHUNKS, seed=st.integers(0, 10**6))
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "none"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM", "StableLmForCausalLM"])
def test_everything_computed_again_is_a_prefill(name: str, strategy: str, sizes: list[int], seed: int) -> None:
    lab, rng = laboratory(name), np.random.default_rng(seed)
    parts = [rng.integers(1, 500, n).tolist() for n in sizes]
    order = rng.permutation(len(parts)).tolist()
    fresh = rng.integers(1, 500, int(rng.integers(1, 20))).tolist()
    elsewhere = [7, *(token for i in order for token in parts[i])]
    ends = np.cumsum([1, *(len(parts[i]) for i in order)]).tolist()
    chunks = dict(zip(order, lab.store(elsewhere, ends, 8)[1:], strict=True))
    starts = np.cumsum([1, *sizes]).tolist()
    ids = [7, *(token for part in parts for token in part), *fresh]
    at = np.arange(starts[-1], len(ids))
    placed = [(start, chunks[i]) for i, start in enumerate(starts[:-1])]
    got = lab.reuse(ids, [], placed, STRATEGIES[strategy], 1.0, at)
    assert got.recomputed_ratio == 1.0
    torch.testing.assert_close(got.logits, lab.full_prefill(ids, at).logits, atol=3e-4, rtol=1e-3)


@settings(max_examples=15, deadline=None)
@given(sizes=CHUNKS, seed=st.integers(0, 10**6), ratio=st.sampled_from([0.1, 0.5, 1.0]))
def test_what_comes_later_changes_nothing_before(sizes: list[int], seed: int, ratio: float) -> None:
    """No row sees the future: perturbing the last chunk leaves all earlier keys and values as they were."""
    loaded, _, pool = _model_with_pool()
    decoder, rng = _decoder(), np.random.default_rng(seed)
    ids = rng.integers(1, 500, sum(sizes) + 6).tolist()
    ends = np.cumsum(sizes).tolist()
    stretches = tuple(RelocatedSpan(a, b) for a, b in pairwise([1, *ends]))
    assert len(stretches) == len(sizes)
    plan = ReusePlan(len(ids), 1, stretches)
    start = stretches[-1].start
    found = []
    for perturbed in (False, True):
        table = pool.allocate(len(ids))
        assert table is not None
        slots = torch.from_numpy(table.slots(0, len(ids)))
        generator = torch.Generator().manual_seed(seed)
        for tensor in (pool.keys, pool.values):
            stored = torch.randn(tensor[:, :, : len(ids)].shape, generator=generator)
            if perturbed:
                stored[:, :, start:] += 1.0
            tensor.index_copy_(2, slots, stored)
        tokens = ids[:start] + [(i * 7 + 3) % 499 + 1 for i in ids[start:]] if perturbed else ids
        work = SelectiveRecompute(decoder, pool, tokens, table, plan, FirstK(), ratio)
        for _ in work.steps():
            pass
        found.append([t_.index_select(2, slots[:start]).clone() for t_ in (pool.keys, pool.values)])
        pool.free(table)
    for before, after in zip(*found, strict=True):
        torch.testing.assert_close(before, after, atol=1e-6, rtol=0)
    assert loaded.layers == 4


def test_what_deviates_is_computed_again_from_its_own_states() -> None:
    """Only layer 1 of six tokens is wrong: these are chosen, and the logits become those of a prefill."""
    _, _, pool = _model_with_pool()
    ids, wrong = np.random.default_rng(0).integers(1, 500, 50).tolist(), np.asarray([5, 6, 17, 23, 30, 39])
    table = pool.allocate(len(ids))
    assert table is not None
    prefill(_decoder(), pool, ids, table)
    slots = torch.from_numpy(table.slots(0, len(ids)))
    want = [tensor.index_select(2, slots) for tensor in (pool.keys, pool.values)]
    for tensor in (pool.keys, pool.values):
        tensor[1, :, slots[wrong]] += 5.0
    plan = ReusePlan(len(ids), 1, (RelocatedSpan(1, 41),))
    work = SelectiveRecompute(_decoder(), pool, ids, table, plan, SELECTORS["cacheblend"], len(wrong) / 40)
    for _ in work.steps():
        pass
    assert work.chosen.tolist() == wrong.tolist()
    for tensor, before in zip((pool.keys, pool.values), want, strict=True):
        torch.testing.assert_close(tensor.index_select(2, slots), before, atol=1e-4, rtol=1e-4)
    pool.free(table)


class Recording(SalientSelector):
    def select(self, plan: ReusePlan, ratio: float, signals: SelectionSignals) -> Positions:
        self.attention = signals.attention
        return super().select(plan, ratio, signals)


def test_what_an_earlier_sequence_left_in_the_pool_has_no_attention() -> None:
    """Tokens between documents are computed last, and the question looks at their slots before."""
    _, _, pool = _model_with_pool()
    ids = np.random.default_rng(0).integers(1, 500, 180).tolist()
    found = []
    for left in (0.0, 5.0):
        table = pool.allocate(len(ids))
        assert table is not None
        prefill(_decoder(), pool, ids, table)
        gap = torch.from_numpy(table.slots(1, 100))
        for tensor in (pool.keys, pool.values):
            tensor.index_copy_(2, gap, left * torch.randn(tensor[:, :, :99].shape, generator=torch.Generator()))
        selector = Recording()
        plan = ReusePlan(len(ids), 1, (RelocatedSpan(100, 150),))
        for _ in SelectiveRecompute(_decoder(), pool, ids, table, plan, selector, 0.2).steps():
            pass
        found.append(selector.attention)
        pool.free(table)
    assert found[0] is not None
    assert np.array_equal(*found)


@cache
def _model_with_pool() -> tuple[LoadedModel, Any, KVPool]:
    return build("LlamaForCausalLM")


@cache
def _decoder() -> Decoder:
    return Decoder(_model_with_pool()[0])
