"""A kernel graph gives the results of separate calls, also with late threads."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from kvkernels.cpu import cpu_graph, cpu_library, f32_gemm, quantized_gemm
from kvkernels.cpu import norm_rope_silu as cpu_rows
from kvkernels.cpu.cpu_library import KernelCall
from torch import Tensor

pytestmark = pytest.mark.skipif(not cpu_library.usable_variants(), reason="no variant of the kernels runs here")
WIDTH, INNER, MAX_ROWS = 320, 640, 30


@pytest.fixture(params=cpu_library.usable_variants(), autouse=True)
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every variant that this CPU can run."""
    chosen = cpu_library.LoadedLibrary(cpu_library.KernelLibrary(request.param), request.param)
    for module in (cpu_graph, cpu_library):
        monkeypatch.setattr(module, "loaded_library", lambda: chosen)
    for made in (f32_gemm.kernel, quantized_gemm.kernel, cpu_library.loaded_kernel):
        made.cache_clear()
    yield
    for made in (f32_gemm.kernel, quantized_gemm.kernel, cpu_library.loaded_kernel):
        made.cache_clear()


class Blocks:
    """Feed-forward blocks over fixed buffers."""

    def __init__(self, count: int, bits: int) -> None:
        torch.manual_seed(count)
        self.hidden, self.normed, self.delta = (torch.zeros(MAX_ROWS, WIDTH) for _ in range(3))
        self.gate_up, self.gated = torch.zeros(MAX_ROWS, 2 * INNER), torch.zeros(MAX_ROWS, INNER)
        self.calls: list[KernelCall] = []
        for i in range(count):
            norm = torch.rand(WIDTH)
            self.calls += [
                cpu_rows.rms_norm(MAX_ROWS, self.hidden, self.delta if i else None, norm, 1e-5, self.normed),
                self._product(2 * INNER, WIDTH, bits, self.normed, self.gate_up),
                cpu_rows.silu_and_mul(MAX_ROWS, self.gate_up, self.gated),
                self._product(WIDTH, INNER, bits, self.gated, self.delta),
            ]

    def _product(self, outputs: int, inputs: int, bits: int, x: Tensor, y: Tensor) -> KernelCall:
        weight = torch.randn(outputs, inputs) / inputs**0.5
        if bits == 16:
            return f32_gemm.gemm_call(x, f32_gemm.pack(weight.bfloat16().float()), None, y)
        return quantized_gemm.gemm_call(x, quantized_gemm.quantize(weight, bits, 64), None, y)

    def one_by_one(self, x: Tensor) -> Tensor:
        self.hidden[: len(x)] = x
        for call in self.calls:
            for i in range(call.counters):
                setattr(call.job, call.job._fields_[i][0], 0)
            call.job.rows = len(x)
            call.run(1)
        return self.delta[: len(x)].clone()


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_it_gives_what_they_give_one_by_one(bits: int, threads: int) -> None:
    blocks, x = Blocks(3, bits), torch.randn(MAX_ROWS, WIDTH)
    whole = cpu_graph.KernelGraph(blocks.calls)
    for rows in (1, 4, 7, MAX_ROWS, 2):
        want = blocks.one_by_one(x[:rows])
        for _ in range(3):
            blocks.hidden[:rows] = x[:rows]
            blocks.delta.fill_(math.nan)
            whole.run(rows, threads)
            assert torch.equal(blocks.delta[:rows], want), f"{rows} rows"


def test_threads_that_get_no_core_hold_nobody_up_for_good() -> None:
    """Oversubscribed threads, competing for cores, give the same bits."""
    blocks, x = Blocks(8, 8), torch.randn(MAX_ROWS, WIDTH)
    whole, want, stop = cpu_graph.KernelGraph(blocks.calls), blocks.one_by_one(x), threading.Event()

    def want_a_core() -> None:
        while not stop.is_set():
            sum(range(10_000))

    busy = [threading.Thread(target=want_a_core) for _ in range(os.cpu_count() or 1)]
    for thread in busy:
        thread.start()
    try:
        for _ in range(20):
            blocks.hidden[:] = x
            blocks.delta.fill_(math.nan)
            whole.run(MAX_ROWS, 4 * (os.cpu_count() or 1))
            assert torch.equal(blocks.delta, want)
    finally:
        stop.set()
        for thread in busy:
            thread.join()


def test_without_kernels_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cpu_graph, "loaded_library", lambda: cpu_library.LoadedLibrary(None, "this CPU has none of them")
    )
    with pytest.raises(RuntimeError, match="this CPU has none"):
        cpu_graph.KernelGraph([])


def test_norm_and_rotation_follow_the_formulas() -> None:
    """Also for a row of zeros, which an epsilon of zero makes NaN."""
    hidden, weight, normed = torch.randn(3, WIDTH), torch.rand(WIDTH), torch.empty(3, WIDTH)
    hidden[1] = 0
    cpu_rows.run(cpu_rows.rms_norm(3, hidden, None, weight, 1e-2, normed), 3)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(hidden, (WIDTH,), weight, 1e-2))

    heads, kv_heads, dim, slots = 4, 2, 32, torch.tensor([5, 0, 9])
    qkv, angles = torch.randn(3, (heads + 2 * kv_heads) * dim), 7 * torch.rand(3, dim)
    keys, values, queries = torch.zeros(kv_heads, 12, dim), torch.zeros(kv_heads, 12, dim), torch.empty(3, heads, dim)
    turns = (angles.cos(), angles.sin())
    cpu_rows.run(cpu_rows.rope(3, qkv, kv_heads, turns, (None, None), 0.0, slots, (keys, values), queries), 3)
    rows = qkv.view(3, heads + 2 * kv_heads, dim)
    other = torch.cat((-rows[..., dim // 2 :], rows[..., : dim // 2]), -1)
    turned = rows * turns[0][:, None] + other * turns[1][:, None]
    torch.testing.assert_close(queries, turned[:, :heads])
    torch.testing.assert_close(keys[:, slots].transpose(0, 1), turned[:, heads:-kv_heads])
    assert torch.equal(values[:, slots].transpose(0, 1), rows[:, -kv_heads:])
