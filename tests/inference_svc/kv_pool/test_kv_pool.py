import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.kv_pool.block_table import PAGE_TOKENS, UNMAPPED, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool

STEPS = st.lists(st.tuples(st.sampled_from(["new", "grow", "share", "trim", "free"]), st.integers(1, 400)), max_size=50)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_no_page_is_lost_or_given_twice(steps: list[tuple[str, int]]) -> None:
    pool = KVPool(1, 1, 2, 32 * PAGE_TOKENS, torch.float32, torch.device("cpu"))
    tables: list[BlockTable] = []
    for what, n in steps:
        held = {s for t in tables for s in t.slots(0, t.tokens).tolist()}
        if what == "new":
            table = pool.allocate(n, spare=n // 2)
            if table is not None:
                assert held.isdisjoint(table.slots(0, table.tokens).tolist())
                tables.append(table)
        elif tables:
            table = tables[n % len(tables)]
            before = table.slots(0, table.tokens).tolist()
            if what == "grow":
                if pool.grow(table, len(before) + n):
                    assert held.isdisjoint(table.slots(len(before), table.tokens).tolist())
                assert table.slots(0, len(before)).tolist() == before
            elif what == "share":
                shared = pool.share(table, min(n, len(before)))
                assert shared.tokens == min(n, len(before)) // PAGE_TOKENS * PAGE_TOKENS
                assert shared.slots(0, shared.tokens).tolist() == before[: shared.tokens]
                tables.append(shared)
            elif what == "trim":
                pool.trim(table, n)
                assert table.slots(0, table.tokens).tolist() == before[: -(-n // PAGE_TOKENS) * PAGE_TOKENS]
            else:
                pool.free(tables.pop(n % len(tables)))
        used = {s for t in tables for s in t.slots(0, t.tokens).tolist()}
        assert len(used) == (pool.pages - pool.free_pages) * PAGE_TOKENS
        assert all(s < pool.padding_slot for s in used)
        pool.check_integrity()
        assert pool.references_match(tables)
    for table in tables:
        pool.free(table)
        pool.free(table)
    assert pool.free_pages == pool.pages


def test_shared_pages_are_not_writable_until_the_other_lets_go() -> None:
    pool = KVPool(1, 1, 2, 16 * PAGE_TOKENS, torch.float32, torch.device("cpu"))
    table = pool.allocate(4 * PAGE_TOKENS)
    assert table is not None
    assert pool.writable(table, 0)
    shared = pool.share(table, 2 * PAGE_TOKENS + 5)
    assert not pool.writable(table, 0)
    assert pool.writable(table, 2 * PAGE_TOKENS)
    pool.free(shared)
    assert pool.writable(table, 0)


def test_zeroing_leaves_shared_pages() -> None:
    pool = KVPool(1, 1, 2, 16 * PAGE_TOKENS, torch.float32, torch.device("cpu"))
    table = pool.allocate(4 * PAGE_TOKENS)
    assert table is not None
    pool.share(table, 2 * PAGE_TOKENS)
    slots = torch.from_numpy(table.slots(0, table.tokens))
    for tensor in (pool.keys, pool.values):
        tensor.fill_(1)
    pool.zero_exclusive(table)
    for tensor in (pool.keys, pool.values):
        left = tensor[0, 0, slots, 0]
        assert left[: 2 * PAGE_TOKENS].all(), "the other table still reads these"
        assert not left[2 * PAGE_TOKENS :].any()


def test_copies_reach_exactly_the_tokens_asked_for() -> None:
    pool = KVPool(2, 1, 4, 16 * PAGE_TOKENS, torch.float32, torch.device("cpu"))
    pool.keys.normal_()
    pool.values.normal_()
    first, scattered = pool.allocate(100), BlockTable()
    assert first is not None
    for _ in range(4):
        part, spacer = pool.allocate(PAGE_TOKENS), pool.allocate(1)
        assert part is not None
        assert spacer is not None
        scattered.ranges.extend(part.ranges)
    for source, target in ((first, scattered), (scattered, first)):
        pool.keys.normal_()
        before = pool.keys.clone()
        pool.copy(source, target, 10, 90)
        here, there = (torch.from_numpy(t.slots(10, 90)) for t in (source, target))
        assert torch.equal(pool.keys[:, :, there], before[:, :, here])
        untouched = [i for i in range(pool.keys.shape[2]) if i not in set(there.tolist())]
        assert torch.equal(pool.keys[:, :, untouched], before[:, :, untouched])


def test_what_is_moved_twice_lies_behind_one_gap() -> None:
    table = BlockTable([(3, 1)]).shift(0, 64).shift(64, 192)
    assert table.ranges == [(UNMAPPED, 6), (3, 1)]
    assert table.num_released == 192


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["new", "leave", "grow", "share", "spread", "free"]), st.integers(1, 700)),
        max_size=40,
    )
)
def test_what_a_window_has_left_is_free_and_the_rest_stays_where_it_was(steps: list[tuple[str, int]]) -> None:
    pool = KVPool(1, 1, 2, 32 * PAGE_TOKENS, torch.float32, torch.device("cpu"), [100])
    tables: list[BlockTable] = []
    for what, n in steps:
        if what == "new" and (table := pool.allocate(n)) is not None:
            tables.append(table)
        elif what == "new" or not tables:
            continue
        table = tables[n % len(tables)]
        before, left = table.slots(0, table.tokens), pool.round_to_step(n)
        if what == "leave":
            pool.release_prefix(table, left)
            gone = max(table.num_released, 0)
            assert gone >= min(left, len(before))
            assert (table.slots(0, gone) == UNMAPPED).all()
            assert np.array_equal(table.slots(gone, len(before)), before[gone:])
        elif what == "grow" and pool.grow(table, n):
            assert np.array_equal(table.slots(0, len(before)), before)
            assert (table.slots(len(before), table.tokens) != UNMAPPED).all()
        elif what == "share":
            tables.append(pool.share(table, min(n, len(before))))
            assert np.array_equal(tables[-1].slots(0, tables[-1].tokens), before[: tables[-1].tokens])
        elif what == "spread" and table.num_released < len(before):
            at = table.num_released
            moved = table.shift(at, at + left)
            assert np.array_equal(moved.slots(at + left, moved.tokens), before[at:])
            tables[n % len(tables)] = moved
        elif what == "free":
            pool.free(tables.pop(n % len(tables)))
        if table.first_slot is not None and table.num_released < table.tokens:
            assert table.first_slot + table.num_released == table.slots(table.num_released, table.num_released + 1)[0]
        pool.check_integrity()
        assert pool.references_match(tables)
    for table in tables:
        pool.free(table)
    assert pool.free_pages == pool.pages
