import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvsidecar.range_allocator import RangeAllocator


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=120))
def test_ranges_never_overlap_and_nothing_is_lost(steps: list[tuple[bool, int]]) -> None:
    extents = RangeAllocator(200)
    held: dict[int, int] = {}
    for take, n in steps:
        if take:
            start = extents.allocate(n)
            if start is None:
                assert extents.largest_free < n
            else:
                assert all(start + n <= s or s + size <= start for s, size in held.items())
                held[start] = n
        elif held:
            start = sorted(held)[n % len(held)]
            assert extents.free(start) == held.pop(start)
        extents.check_integrity()
    for start in list(held):
        extents.free(start)
    assert extents.largest_free == 200


@given(st.integers(1, 50), st.integers(1, 50))
def test_extend_takes_exactly_the_units_behind(first: int, more: int) -> None:
    extents = RangeAllocator(100)
    start = extents.allocate(first)
    assert start == 0
    assert extents.extend(first, more)
    assert extents.free_units == 100 - first - more
    extents.check_integrity()
    blocker = extents.allocate(1)
    assert blocker is None or not extents.extend(first + more, 1)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data())
def test_parts_of_a_range_can_be_freed(sizes: list[int], data: st.DataObject) -> None:
    extents = RangeAllocator(200)
    taken = {u for n in sizes for start in [extents.allocate(n)] if start is not None for u in range(start, start + n)}
    while taken:
        start = data.draw(st.sampled_from(sorted(taken)))
        extents.free_part(start, 1)
        taken.discard(start)
        extents.check_integrity()
        assert extents.free_units == 200 - len(taken)
        with pytest.raises(KeyError):
            extents.free_part(start, 1)
