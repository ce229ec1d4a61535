"""Weights in one arena: the same bits, one copy in memory, nothing moved where that is not possible."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from kvkernels.cpu import f32_gemm, large_pages, quantized_gemm
from torch import nn

from inference_svc.models import weight_arena
from inference_svc.models.layer_streaming.weight_form import bytes_of
from inference_svc.models.linear.dense_linear import DenseLinear
from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.linear.plain_linear import PlainLinear
from inference_svc.models.linear.quantized_linear import QuantizedLinear
from inference_svc.models.weight_arena import move_to_arena

needs_kernels = pytest.mark.skipif(f32_gemm.kernel() is None, reason="no CPU kernels")


def layers() -> list[nn.Module]:
    weight, bias = torch.randn(192, 128), torch.randn(192)
    made: list[nn.Module] = [
        DenseLinear(f32_gemm.pack(weight.bfloat16().float()), bias),
        DenseLinear(f32_gemm.pack(weight), None),
        QuantizedLinear(quantized_gemm.quantize(weight, 4, 64), bias),
        PlainLinear(weight, bias),
    ]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        made.append(PackedLinear(weight.bfloat16(), bias.bfloat16()))
    return made


@needs_kernels
def test_layers_compute_the_same_bits_from_one_arena() -> None:
    moved = layers()
    rows = [torch.randn(5, 128).to(torch.bfloat16 if isinstance(m, PackedLinear) else torch.float32) for m in moved]
    before = [(layer(x), bytes_of(layer).clone()) for layer, x in zip(moved, rows, strict=True)]
    arena = move_to_arena([nn.LayerNorm(8), *moved])
    assert arena is not None
    first, end = arena.data_ptr(), arena.data_ptr() + arena.nbytes
    for layer, x, (out, weight) in zip(moved, rows, before, strict=True):
        assert torch.equal(layer(x), out)
        assert torch.equal(bytes_of(layer), weight)
        assert first <= bytes_of(layer).data_ptr() < end


@needs_kernels
def test_without_memory_or_packed_views_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(size: int) -> torch.Tensor:
        raise OSError("no memory")

    moved = layers()
    places = [bytes_of(layer).data_ptr() for layer in moved]
    with monkeypatch.context() as patched:
        patched.setattr(large_pages, "allocate", refuse)
        assert move_to_arena(moved) is None
    packed = PackedLinear.empty(64, 64, None)
    monkeypatch.setattr(weight_arena.onednn_weights, "available", lambda: False)
    assert move_to_arena([*moved, packed]) is None
    assert [bytes_of(layer).data_ptr() for layer in moved] == places


_CHILD = """
    import threading, time
    import torch
    from kvkernels.cpu import f32_gemm, large_pages
    from inference_svc.models.linear.dense_linear import DenseLinear
    from inference_svc.models.weight_arena import move_to_arena

    def rss():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) >> 10

    layers = [DenseLinear(f32_gemm.pack(torch.randn(2048, 2048)), None) for _ in range(64)]  # 16 MiB each
    before, peak, ended = rss(), 0, threading.Event()
    def watch():
        global peak
        while not ended.wait(0.002):
            peak = max(peak, rss())
    watcher = threading.Thread(target=watch)
    watcher.start()
    move_to_arena(layers)
    ended.set()
    watcher.join()
    print(before, peak, rss())
"""


@needs_kernels
def test_moving_holds_no_second_copy_of_the_model() -> None:
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_CHILD)], capture_output=True, text=True, timeout=120, check=True
    )
    before, peak, after = map(int, child.stdout.split())
    assert before > 1000, "a gibibyte of weights"
    assert peak < before + 450, "MiB: those of a trim and a weight, and what a piece's large pages take"
    assert after < before + 100
