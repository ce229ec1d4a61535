"""CUDA attention kernels against attention by definition in float64."""

import pytest
import torch
from kvkernels.cuda.cuda_attention import HEAD_DIMS, AttentionRows, PagedKV, attend, splits_for

from tests.kvkernels.emulated.conftest import SCHEDULES, Emulated, Schedule
from tests.kvkernels.emulated.oracle import Case, assert_close, attention, cascade, int32

RAGGED = (
    ((1, 1),),
    ((1, 300),),
    ((64, 64),),
    ((65, 200),),
    ((3, 130), (1, 64), (40, 40), (17, 129)),
)
DTYPES = (torch.float16, torch.bfloat16)


def run_in_pool(
    emulated: Emulated, case: Case, splits: int | None = None, paged: int = 0, window: int = 0, softcap: float = 0.0
) -> None:
    """Check sequences in a pool, contiguous or paged, against attention by definition."""
    gap, slots, first = 5, 0, []
    for _, count in case.sequences:
        first.append(slots + gap)
        slots += gap + count
    keys, values = case.keys_values(slots + 64)
    query, scale = case.query(), case.dim**-0.5
    held = [(keys[:, f : f + n], values[:, f : f + n]) for f, (_, n) in zip(first, case.sequences, strict=True)]
    source = PagedKV(keys, values, first_slot=int32(*first))
    if paged:
        most = max(-(-n // paged) for _, n in case.sequences)
        order = torch.randperm(most * len(case.sequences), generator=case.generator()).view(-1, most).to(torch.int32)
        pool_k, pool_v = (torch.full((case.kv_heads, order.numel() * paged, case.dim), float("nan")) for _ in range(2))
        for pages, (k, v) in zip(order, held, strict=True):
            for token in range(k.shape[1]):
                slot = int(pages[token // paged]) * paged + token % paged
                pool_k[:, slot], pool_v[:, slot] = k[:, token], v[:, token]
        source = PagedKV(pool_k.to(case.dtype), pool_v.to(case.dtype), pages=order, page_tokens=paged)
    got = attend(emulated, query, source, case.rows(), scale, window, softcap, splits)
    parts, at = [], 0
    for (rows, _), (k, v), positions in zip(case.sequences, held, case.positions(), strict=True):
        parts.append(attention(query[at : at + rows], k, v, positions, scale, window, softcap))
        at += rows
    assert_close(got, (torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])))


@pytest.mark.parametrize("sequences", RAGGED)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (7, 1), (8, 2)])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_dimension_group_and_shape(
    emulated: Emulated, dtype: torch.dtype, dim: int, heads: int, kv_heads: int, sequences: tuple[tuple[int, int], ...]
) -> None:
    run_in_pool(emulated, Case(sequences, heads, kv_heads, dim, dtype))


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("paged", [0, 16, 32])
def test_splits_and_pages_change_nothing(emulated: Emulated, paged: int, splits: int) -> None:
    run_in_pool(emulated, Case(((33, 200), (1, 90), (2, 2)), 4, 2, 64, torch.float16), splits, paged)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("dim", [64, 256])
def test_neither_the_order_of_warps_nor_early_copies_change_anything(
    emulated: Emulated, dim: int, schedule: Schedule
) -> None:
    emulated.schedule(schedule)
    run_in_pool(emulated, Case(((33, 200), (1, 90), (2, 2)), 4, 2, dim, torch.float16), splits=2, paged=16)


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("splits", [1, 3])
def test_scattered_rows_see_keys_up_to_their_own_position(emulated: Emulated, dim: int, splits: int) -> None:
    run_in_pool(emulated, Case(((40, 300), (5, 70)), 4, 2, dim, torch.bfloat16, scattered=True), splits)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("window", [1, 50, 128])
def test_a_sliding_window_hides_what_is_far(emulated: Emulated, window: int, scattered: bool) -> None:
    run_in_pool(emulated, Case(((40, 300), (100, 100)), 2, 1, 64, torch.float16, scattered), 2, window=window)


@pytest.mark.parametrize("dim", [128, 256])
def test_a_soft_cap_bends_the_scores(emulated: Emulated, dim: int) -> None:
    run_in_pool(emulated, Case(((20, 150),), 4, 2, dim, torch.float16), softcap=2.0)
    run_in_pool(emulated, Case(((20, 150),), 4, 2, dim, torch.bfloat16), softcap=50.0, window=64)


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("sequences", RAGGED)
def test_volta_takes_its_fragments_by_shuffles(
    volta: Emulated, dim: int, sequences: tuple[tuple[int, int], ...]
) -> None:
    run_in_pool(volta, Case(sequences, 4, 2, dim, torch.float16), splits=2)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sequences", [((1, 1), (1, 70), (1, 33)), ((3, 130), (1, 64), (40, 40), (17, 129))])
def test_a_prefix_is_read_once_for_several_sequences(
    emulated: Emulated, sequences: tuple[tuple[int, int], ...], dtype: torch.dtype, dim: int
) -> None:
    """The last sequence has no part of it. Parts are merged by log-sum-exp."""
    case = Case(sequences, 4, 2, dim, dtype)
    assert_close(*cascade(emulated, case, 130, len(sequences) - 1))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_prefix_in_parts_changes_nothing(emulated: Emulated, schedule: Schedule) -> None:
    emulated.schedule(schedule)
    assert_close(*cascade(emulated, Case(((1, 9), (5, 70), (1, 2)), 7, 1, 64, torch.bfloat16), 200, 2, splits=3))


def test_rows_that_see_nothing_are_zero(emulated: Emulated) -> None:
    case = Case(((3, 0),), 2, 2, 64, torch.float16)
    keys, values = case.keys_values(8)
    rows = AttentionRows(int32(0, 3), int32(0), None, 3, 0)
    output, lse = attend(emulated, case.query(), PagedKV(keys, values, int32(0)), rows, 1.0, splits=2)
    assert not output.any()
    assert (lse == float("-inf")).all()


def test_keys_are_split_until_the_device_is_full() -> None:
    assert splits_for(tiles=1, max_kv_len=65536, processors=132) == 64
    assert splits_for(tiles=500, max_kv_len=65536, processors=132) == 1
    assert splits_for(tiles=1, max_kv_len=300, processors=132) == 1


def test_what_kernels_do_not_take_is_named(emulated: Emulated) -> None:
    case = Case(((1, 1),), 1, 1, 80, torch.float16)
    with pytest.raises(ValueError, match="head_dim is 80; kernels take 64, 96, 128, 256"):
        run_in_pool(emulated, case)
    with pytest.raises(ValueError, match=r"dtype is torch\.float32"):
        attend(emulated, torch.zeros(1, 1, 64), PagedKV(*(torch.zeros(1, 1, 64),) * 2, int32(0)), case.rows(), 1.0)
