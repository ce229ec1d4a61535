"""CPU attention is correct and batch-invariant."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from kvkernels.cpu import cpu_attention, cpu_library
from kvkernels.cpu import thread_pool as threads
from kvkernels.cpu.cpu_attention import PAGE, Attention, SequenceRows, num_pages
from numpy.typing import NDArray
from torch import Tensor

pytestmark = pytest.mark.skipif(cpu_library.loaded_library().library is None, reason=cpu_library.loaded_library().why)

LAYERS, LAYER = 2, 1
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1.5e-2}


class Case:
    """A sequence of ``keys`` tokens on shuffled blocks, and queries at some positions."""

    def __init__(
        self, dtype: torch.dtype, dim: int, heads: int, kv_heads: int, keys: int, positions: NDArray[np.int64]
    ) -> None:
        random = torch.Generator().manual_seed(keys + dim)
        count = num_pages(keys)
        shape = LAYERS, kv_heads, (count + 4) * PAGE, dim
        self.keys, self.values = (torch.randn(shape, generator=random).to(dtype) for _ in range(2))
        self.pages = torch.randperm(count + 3, generator=random)[:count].numpy() * PAGE
        self.slots = torch.from_numpy(np.concatenate([np.arange(p, p + PAGE) for p in self.pages]))[:keys]
        self.query = torch.randn(len(positions), heads, dim, generator=random).to(dtype)
        self.positions = positions

    def attend(
        self, first: int = 0, end: int | None = None, window: int | None = None, cap: float | None = None
    ) -> Tensor:
        """Compute the rows ``first`` to ``end`` with the kernel."""
        query, positions = self.query[first:end].contiguous(), self.positions[first:end].copy()
        out = torch.full_like(query, float("nan"))
        rows = [SequenceRows(0, len(query), self.pages[: num_pages(int(positions[-1]) + 1)])]
        attention = Attention(positions, rows, query.shape[1], (self.keys, self.values), cap)
        attention.bind(query, out)
        attention(LAYER, query.shape[2] ** -0.5, window)
        return out

    def reference(self, window: int | None = None, cap: float | None = None) -> Tensor:
        v = self.values[LAYER][:, self.slots].double().repeat_interleave(self.per_kv, 0)
        return torch.einsum("hrk,hkd->rhd", self.weights(window, cap), v).float()

    @property
    def per_kv(self) -> int:
        return self.query.shape[1] // self.keys.shape[1]

    def weights(self, window: int | None = None, cap: float | None = None) -> Tensor:
        """Return the attention probabilities ``[heads, rows, keys]``."""
        k = self.keys[LAYER][:, self.slots].double().repeat_interleave(self.per_kv, 0)
        scores = torch.einsum("rhd,hkd->hrk", self.query.double(), k) * self.query.shape[2] ** -0.5
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        row, key = torch.from_numpy(self.positions)[:, None], torch.arange(len(self.slots))
        hidden = key > row
        if window is not None:
            hidden |= key <= row - window
        return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)


def last(count: int, keys: int) -> NDArray[np.int64]:
    return np.arange(keys - count, keys)


@pytest.fixture(params=cpu_library.usable_variants(), autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant that this CPU can run."""
    chosen = cpu_library.LoadedLibrary(cpu_library.KernelLibrary(request.param), request.param)
    monkeypatch.setattr(cpu_attention, "loaded_library", lambda: chosen)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads"), [(64, 14, 2), (128, 8, 8), (96, 6, 2), (80, 4, 1), (16, 4, 2), (256, 4, 1)]
)
def test_it_is_attention(dtype: torch.dtype, dim: int, heads: int, kv_heads: int) -> None:
    for keys, positions in ((1, last(1, 1)), (200, last(200, 200)), (300, last(1, 300)), (130, last(70, 130))):
        case = Case(dtype, dim, heads, kv_heads, keys, positions)
        torch.testing.assert_close(case.attend().float(), case.reference(), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [1, 63, 64, 65, 150, 1000])
def test_a_window_hides_what_is_older(dtype: torch.dtype, window: int) -> None:
    case = Case(dtype, 64, 4, 2, 300, last(250, 300))
    found = case.attend(window=window).float()
    torch.testing.assert_close(found, case.reference(window), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_scores_are_capped(dtype: torch.dtype, cap: float) -> None:
    case = Case(dtype, 64, 4, 2, 200, last(120, 200))
    found = case.attend(cap=cap).float()
    torch.testing.assert_close(found, case.reference(cap=cap), atol=2 * TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rows_may_be_scattered(dtype: torch.dtype) -> None:
    positions = np.unique(np.random.default_rng(3).integers(0, 500, 90))
    case = Case(dtype, 64, 6, 2, 500, positions)
    torch.testing.assert_close(case.attend().float(), case.reference(), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 100])
def test_it_says_how_hard_keys_are_looked_at(dtype: torch.dtype, window: int | None) -> None:
    case = Case(dtype, 64, 14, 2, 500, last(300, 500))
    rows, out = [SequenceRows(0, 300, case.pages)], torch.empty_like(case.query)
    attention = Attention(case.positions, rows, 14, (case.keys, case.values), recorded_layers=1)
    attention.bind(case.query, out)
    for _ in range(2):
        attention(LAYER, 0.125, window)
        found = torch.from_numpy(next(attention.max_probs()))
        want = case.weights(window).amax(1).float()
        torch.testing.assert_close(found[:, :500], want, atol=1e-6, rtol=1e-3)
        assert not found[:, 500:].any()
    assert torch.equal(out, case.attend(window=window))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_has_the_same_bits_in_every_company(dtype: torch.dtype, window: int | None) -> None:
    case, random = Case(dtype, 64, 14, 2, 700, last(700, 700)), np.random.default_rng(1)
    whole = case.attend(window=window)
    cuts = [0, *sorted(random.choice(np.arange(1, 700), 12, replace=False).tolist()), 700]
    for first, end in pairwise(cuts):
        assert torch.equal(case.attend(first, end, window), whole[first:end]), (first, end)
    for row in (0, 1, 63, 64, 65, 500, 699):
        assert torch.equal(case.attend(row, row + 1, window)[0], whole[row]), row
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(case.attend(window=window), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 1000])
def test_one_long_sequence_is_for_all_threads_and_keeps_its_bits(dtype: torch.dtype, window: int | None) -> None:
    case = Case(dtype, 64, 4, 2, 2500, last(2, 2500))
    torch.testing.assert_close(
        case.attend(window=window).float(), case.reference(window), atol=TOLERANCE[dtype], rtol=0
    )
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            found.append(case.attend(window=window))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)
    work = cpu_attention._Work.of(case.positions, [SequenceRows(0, 2, case.pages)], 2, 2, 8, False)
    assert len(work.units) == 5, "a piece of 512 keys for each thread that comes"


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_nan_is_the_rows_own_that_see_it(dtype: torch.dtype) -> None:
    case = Case(dtype, 64, 4, 2, 700, last(700, 700))
    want = case.attend()
    for pool, damaged in ((case.keys, 300), (case.values, 640)):
        pool[LAYER, 1, case.slots[damaged], 7] = float("nan")
        found = case.attend()
        assert found[damaged:, 2:].isnan().any(-1).all(), "who sees it, says so"
        assert torch.equal(found[:, :2], want[:, :2]), "another head"
        assert torch.equal(case.attend(0, 64), want[:64]), "another block"
        pool[LAYER, 1, case.slots[damaged], 7] = 0


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_sequences_in_one_call_are_strangers(dtype: torch.dtype) -> None:
    case = Case(dtype, 64, 4, 2, 400, last(400, 400))
    pieces = [(0, 10), (390, 391), (100, 250), (399, 400)]
    rows, at = [], 0
    for first, end in pieces:
        rows.append(SequenceRows(at, end - first, case.pages[: num_pages(end)]))
        at += end - first
    query = torch.cat([case.query[a:b] for a, b in pieces])
    out = torch.empty_like(query)
    positions = np.concatenate([case.positions[a:b] for a, b in pieces])
    attention = Attention(positions, rows, 4, (case.keys, case.values))
    attention.bind(query, out)
    attention(LAYER, 0.125, None)
    assert torch.equal(out, torch.cat([case.attend(a, b) for a, b in pieces]))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_lies_behind_a_row_does_not_matter(dtype: torch.dtype) -> None:
    case = Case(dtype, 64, 4, 2, 100, last(40, 100))
    before = case.attend()
    unseen = torch.ones(case.keys.shape[2], dtype=torch.bool)
    unseen[case.slots] = False
    for junk in (3e38, float("nan"), float("inf")):
        case.keys[:, :, unseen] = junk
        case.values[:, :, unseen] = -junk
        assert torch.equal(case.attend(), before)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [1, 40, 64, 100])
@pytest.mark.parametrize("rows", [1, 40])
def test_what_lies_before_a_window_does_not_matter(dtype: torch.dtype, window: int, rows: int) -> None:
    """Pages before the window may be reused by other sequences, whose NaN must not leak."""
    case = Case(dtype, 64, 4, 2, 300, last(rows, 300))
    before = case.attend(window=window)
    unseen = case.slots[: 300 - rows - window + 1]
    for junk in (3e38, float("nan"), float("inf")):
        case.keys[:, :, unseen] = junk
        case.values[:, :, unseen] = -junk
        assert torch.equal(case.attend(window=window), before)


def test_large_scores_stay_finite() -> None:
    case = Case(torch.float32, 64, 4, 2, 200, last(100, 200))
    case.query *= 1e4
    found = case.attend()
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, case.reference(), atol=1e-2, rtol=0)


def test_without_torchs_threads_our_own_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(torch.float32, 64, 4, 2, 300, last(300, 300))
    want = case.attend()
    monkeypatch.setattr(threads, "openmp", lambda: None)
    assert torch.equal(case.attend(), want)


def test_two_threads_at_a_time_do_not_meet() -> None:
    cases = [Case(torch.float32, 64, 4, 2, 300 + n, last(300, 300 + n)) for n in range(2)]
    want, wrong = [case.attend() for case in cases], []

    def work(case: Case, expected: Tensor) -> None:
        for _ in range(30):
            if not torch.equal(case.attend(), expected):
                wrong.append(case)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(cases, want, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float16, 64), (torch.float32, 8), (torch.float32, 272)])
def test_others_are_refused(dtype: torch.dtype, dim: int) -> None:
    assert not cpu_attention.serves(dtype, dim)
    pool = torch.zeros(1, 1, PAGE * 2, dim, dtype=dtype)
    rows = [SequenceRows(0, 1, np.array([0, PAGE]))]
    with pytest.raises(ValueError, match=f"heads of {dim} on this CPU"):
        Attention(np.zeros(1, np.int64), rows, 1, (pool, pool))
