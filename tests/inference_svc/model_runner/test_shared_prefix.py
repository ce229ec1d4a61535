"""Attention reads a prefix that sequences share once for all of them, and computes what it computes over copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inference_svc.kv_pool.block_table import PAGE_TOKENS, BlockTable, KeyRanges
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import cuda_attention
from inference_svc.model_runner.cuda_attention import CudaAttention, build_index
from inference_svc.model_runner.cuda_graphs import CudaGraphs
from inference_svc.model_runner.decoder import Decoder
from inference_svc.model_runner.forward_batch import Branch, ForwardBatch, SequenceSlice, build_batch
from inference_svc.model_runner.shared_prefix import PrefixGroup, group_by_prefix, split_at_shared
from tests.inference_svc.model_runner.test_cuda_attention import by_mask, loaded
from tests.inference_svc.model_runner.test_cuda_graphs import Replaying
from tests.kvkernels.emulated.conftest import Emulated, library

CPU = torch.device("cpu")
SHARED = 3 * PAGE_TOKENS
# Two sequences continue the same prefix, which is the beginning of a third one; the fourth has nothing in common.
PARTING = BlockTable([(2, 3), (12, 2)])
TABLES = [PARTING, BlockTable([(2, 3), (20, 2)]), BlockTable([(2, 5)]), BlockTable([(25, 5)])]


@pytest.fixture(scope="module")
def emulated() -> Emulated:
    return library()


def random_pool() -> KVPool:
    pool, generator = KVPool(1, 2, 64, 1024, torch.bfloat16, CPU), torch.Generator().manual_seed(1)
    for tensor in (pool.keys, pool.values):
        tensor.normal_(generator=generator)
    return pool


def attended(attention: CudaAttention, batch: ForwardBatch) -> torch.Tensor:
    query = torch.randn(len(batch.tokens), 4, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    return attention(query, batch, 0, 0.125, None, None)[: batch.real].float()


def copied(pool: KVPool, tables: list[BlockTable]) -> tuple[KVPool, list[BlockTable]]:
    """A pool in which each table has contiguous blocks of its own, with the same keys and values."""
    other, found = KVPool(1, 2, 64, 1024, torch.bfloat16, CPU), []
    for table in tables:
        own = other.allocate_contiguous(table.tokens)
        assert own is not None
        there, here = (torch.from_numpy(one.slots(0, table.tokens)) for one in (own, table))
        other.keys[:, :, there], other.values[:, :, there] = pool.keys[:, :, here], pool.values[:, :, here]
        found.append(own)
    return other, found


@pytest.mark.parametrize(
    "rows", [(1, 1, 1, 1), (1, 5, 1, 30), (17, 1, 2, 1)], ids=["decode", "drafts and a prompt", "part of a prompt"]
)
def test_attention_over_a_shared_prefix_is_that_over_copies(emulated: Emulated, rows: tuple[int, ...]) -> None:
    pool = random_pool()
    apart, contiguous = copied(pool, TABLES)
    attention, found = CudaAttention(emulated), []
    for there, tables in ((pool, TABLES), (apart, contiguous)):
        slices = [SequenceSlice([1] * n, SHARED + 9, table, True) for n, table in zip(rows, tables, strict=True)]
        found.append(attended(attention, build_batch(slices, there, CPU)))
    torch.testing.assert_close(*found, atol=4e-3, rtol=1e-2)


def test_rows_with_the_same_prefix_are_one_sequence_of_the_kernel() -> None:
    pool, counts = random_pool(), (1, 4, 2, 1)
    slices = [SequenceSlice([1] * n, SHARED + 9, table, True) for n, table in zip(counts, TABLES, strict=True)]
    (part,) = build_index(build_batch(slices, pool, CPU))
    assert part.prefix is not None
    assert part.prefix.rows.qo_indptr.tolist() == [0, 7, 8]
    assert part.prefix.rows.kv_lens.tolist() == [SHARED, 0]
    assert part.prefix.first_slot.tolist() == [2 * PAGE_TOKENS, 0]
    assert part.rows.kv_lens.tolist() == [10, 13, 11, SHARED + 10]
    assert part.first_slot is not None
    assert part.first_slot.tolist() == [12 * PAGE_TOKENS, 20 * PAGE_TOKENS, 5 * PAGE_TOKENS, 25 * PAGE_TOKENS]


def test_the_branches_of_a_draft_tree_share_the_prefix_of_their_sequence(emulated: Emulated) -> None:
    pool, start = random_pool(), SHARED + 9
    trunk = BlockTable([(2, 5)])
    fork = Branch([3, 4], start + 1, 0, 2, BlockTable([(2, 3), (20, 2)]))
    tree = SequenceSlice([1, 2], start, trunk, True, num_drafted=1, branches=(fork,))
    batch = build_batch([tree], pool, CPU)
    (part,) = build_index(batch)
    assert part.prefix is not None
    assert part.prefix.rows.qo_indptr.tolist() == [0, 4]
    apart, (first, second) = copied(pool, [trunk, fork.table])
    alone = [SequenceSlice([1, 2], start, first, True), SequenceSlice([3, 4], start + 1, second, True)]
    attention = CudaAttention(emulated)
    found, want = attended(attention, batch), attended(attention, build_batch(alone, apart, CPU))
    torch.testing.assert_close(found, want, atol=4e-3, rtol=1e-2)


def test_a_row_inside_the_first_range_sees_no_later_key(emulated: Emulated) -> None:
    """Such rows are part of a prompt whose own blocks are in two ranges."""
    pool, start = random_pool(), SHARED - 20
    apart, (whole,) = copied(pool, [PARTING])
    attention, found = CudaAttention(emulated), []
    for there, table in ((pool, PARTING), (apart, whole)):
        found.append(attended(attention, build_batch([SequenceSlice([1] * 40, start, table, True)], there, CPU)))
    assert torch.equal(*found), "each key is read by its slot"


def test_a_library_computes_a_long_part_of_a_prompt_behind_a_shared_prefix(
    emulated: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_attention, "LIBRARY_ROWS", 40)
    calls: list[tuple[int, int]] = []

    def flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        calls.append((query.shape[2], keys.shape[2]))
        return by_mask(query, keys, values, scale)

    batch = build_batch([SequenceSlice([1] * 45, SHARED + 9, PARTING, True)], random_pool(), CPU)
    found = attended(CudaAttention(emulated, library=flash), batch)
    assert calls == [(45, SHARED + 54)]
    assert (found - attended(CudaAttention(emulated), batch)).abs().max() < 0.03


def test_recorded_steps_read_shared_prefixes(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_svc.models.fused_layer_weights.can_fuse_model", lambda model: False)
    model = loaded("Qwen3ForCausalLM")
    decoder, recorder = Decoder(model), Replaying()
    pool = KVPool(model.layers, model.kv_heads, model.head_dim, 1024, torch.bfloat16, model.device)
    pool.native = CudaAttention(emulated)
    graphs, lengths = CudaGraphs(decoder, pool, recorder, 8), [SHARED + 3, SHARED + 20, SHARED + 7, 40]
    generator = torch.Generator().manual_seed(2)
    prefix, *others = (torch.randint(0, 300, (SHARED,), generator=generator).tolist() for _ in range(5))
    for table, length, tail in zip(TABLES, lengths, others, strict=True):
        ids = (prefix + tail)[:length]
        decoder(build_batch([SequenceSlice(ids, 0, table, True)], pool, model.device))
    buckets = []
    for chosen in ([0], [0, 1], [0, 1, 2], [0, 1, 3], [3], [0, 1, 2, 3], [1, 3, 0], [2]):
        spans = [SequenceSlice([7 + i], lengths[i], TABLES[i], True) for i in chosen]
        want = decoder(build_batch(spans, pool, model.device)).clone()
        for span in spans:  # what the step wrote is written anew
            pool.zero_tokens(span.table, span.start, span.end)
        assert graphs.serves(spans)
        found = graphs(spans)
        assert found is not None
        torch.testing.assert_close(found, want, atol=0.03, rtol=0.03)
        for i in chosen:
            lengths[i] += 1
        buckets.append(len(graphs._recorded))
    prefixes = {(bucket.sequences, bucket.prefixes) for bucket in graphs._recorded}
    assert prefixes == {(1, 1), (2, 1), (4, 1), (4, 2), (1, 0), (4, 4)}
    assert recorder.recorded == len(prefixes)


def test_only_behind_a_prefix_that_all_layers_see_is_a_step_recorded(emulated: Emulated) -> None:
    def serves(pool: KVPool, start: int, table: BlockTable) -> bool:
        pool.native = CudaAttention(emulated)
        decoder: Any = None
        return CudaGraphs(decoder, pool, Replaying(), 8).serves([SequenceSlice([1], start, table, True)])

    assert serves(random_pool(), SHARED, PARTING)
    assert not serves(random_pool(), SHARED - 1, PARTING)
    assert not serves(random_pool(), SHARED + 70, BlockTable([(2, 3), (12, 1), (8, 2)]))
    windowed = KVPool(2, 2, 64, 1024, torch.bfloat16, CPU, [None, 64])
    assert not serves(windowed, SHARED, PARTING), "a window begins inside the prefix"
    assert serves(windowed, SHARED, BlockTable([(2, 5)]))


def test_a_contiguous_sequence_is_split_where_others_continue() -> None:
    alone, parting, longer = KeyRanges(64, 0, 64), KeyRanges(64, 96, 400), KeyRanges(64, 128, 500)
    assert split_at_shared([alone, parting], [200, 100]) == [KeyRanges(64, 96, 160), parting]
    assert split_at_shared([alone, parting, longer], [200, 100, 130]) == [KeyRanges(64, 128, 192), parting, longer]
    assert split_at_shared([alone, parting, longer], [127, 100, 130])[0] == KeyRanges(64, 96, 160)
    assert split_at_shared([alone, parting], [95, 100]) == [alone, parting], "its rows are inside the prefix"
    assert split_at_shared([alone, KeyRanges(0, 0, 0)], [200, 100]) == [alone, KeyRanges(0, 0, 0)]


def test_neighbours_with_the_same_prefix_are_one_group() -> None:
    one, other, none = KeyRanges(64, 96, 400), KeyRanges(64, 96, 500), KeyRanges(7, 0, 7)
    assert group_by_prefix([one, other, none, none, one], [1, 2, 3, 1, 1]) == [
        PrefixGroup(3, 64, 96),
        PrefixGroup(4, 0, 0),
        PrefixGroup(1, 64, 96),
    ]
