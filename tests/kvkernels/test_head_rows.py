"""Kernels around the head: rows in float32, and each row's first likeliest token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from kvkernels.cpu import cpu_graph, cpu_library, head_rows
from torch import Tensor

pytestmark = pytest.mark.skipif(not cpu_library.usable_variants(), reason="no variant of the kernels runs here")
ROWS, PIECE = 6, head_rows._PIECE


@pytest.fixture(params=cpu_library.usable_variants(), autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every variant that this CPU can run."""
    chosen = cpu_library.LoadedLibrary(cpu_library.KernelLibrary(request.param), request.param)
    for module in (cpu_graph, cpu_library):
        monkeypatch.setattr(module, "loaded_library", lambda: chosen)
    cpu_library.loaded_kernel.cache_clear()
    yield
    cpu_library.loaded_kernel.cache_clear()


def found(logits: Tensor, rows: int, threads: int = 2, times: int = 1) -> tuple[list[int], list[float]]:
    peaks, tokens = torch.zeros(len(logits)), torch.zeros(len(logits), dtype=torch.int64)
    graph = cpu_graph.KernelGraph([head_rows.likeliest(logits, peaks, tokens)])
    for _ in range(times):
        graph.run(rows, threads)
    return tokens[:rows].tolist(), peaks[:rows].tolist()


@pytest.mark.parametrize("width", [1, 5, 16, 333, PIECE, PIECE + 1, 3 * PIECE + 7])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_it_finds_the_first_largest_logit_of_each_row(width: int, threads: int) -> None:
    logits = torch.randint(-40, 40, (ROWS, width), generator=torch.Generator().manual_seed(width)).float()
    for rows in (ROWS, 1):
        tokens, peaks = found(logits, rows, threads, times=3)
        assert tokens == logits[:rows].numpy().argmax(-1).tolist()
        assert peaks == logits[:rows].amax(-1).tolist()


def test_every_place_of_the_largest_logit_is_found() -> None:
    width = PIECE + 37
    for token in (*range(40), *range(PIECE - 20, PIECE + 20), *range(width - 40, width)):
        logits = torch.full((1, width), -3.0)
        logits[0, token] = -2.0
        assert found(logits, 1, 1) == ([token], [-2.0])


@pytest.mark.parametrize("place", [0, 17, PIECE - 1, PIECE + 1])
def test_nan_is_found_and_infinity_is_a_logit(place: int) -> None:
    logits = torch.full((3, 2 * PIECE + 3), -math.inf)
    logits[0, place], logits[1, place] = math.nan, math.inf
    logits[0, 5] = 9.0
    tokens, peaks = found(logits, 3)
    assert math.isnan(peaks[0])
    assert (tokens[1], peaks[1]) == (place, math.inf)
    assert (tokens[2], peaks[2]) == (0, -math.inf)


@pytest.mark.parametrize("width", [3, 64, 101])
def test_rows_are_widened_without_a_change(width: int) -> None:
    x, y = torch.randn(ROWS, width).bfloat16(), torch.zeros(ROWS, width)
    cpu_graph.KernelGraph([head_rows.widen(x, y)]).run(ROWS - 1, 2)
    assert torch.equal(y[:-1], x[:-1].float())
    assert not y[-1].any(), "a row beyond the count"
