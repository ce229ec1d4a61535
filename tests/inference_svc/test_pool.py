import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_svc.engine.pool import PAGE_TOKENS, BlockTable, KVPool


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["new", "grow", "free"]), st.integers(1, 400)), max_size=40))
def test_pages_belong_to_one_table_at_a_time(steps: list[tuple[str, int]]) -> None:
    pool = KVPool(1, 1, 2, 32 * PAGE_TOKENS, torch.float32, torch.device("cpu"))
    tables: list[BlockTable] = []
    for what, n in steps:
        if what == "new":
            table = pool.allocate(n, spare=n // 2)
            if table is not None:
                tables.append(table)
        elif tables and what == "grow":
            table = tables[n % len(tables)]
            before = table.tokens
            if not pool.grow(table, before + n):
                assert table.tokens == before
        elif tables:
            pool.free(tables.pop(n % len(tables)))
        used = [s for t in tables for s in t.slots(0, t.tokens).tolist()]
        assert len(used) == len(set(used))
        assert len(used) == (pool.pages - pool.free_pages) * PAGE_TOKENS
        assert all(s < pool.padding_slot for s in used)
        pool.check_integrity()
    for table in tables:
        pool.free(table)
        pool.free(table)
    assert pool.free_pages == pool.pages
