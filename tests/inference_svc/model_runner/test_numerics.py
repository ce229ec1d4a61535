"""Workers share stored chunks if, and only if, they compute the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvkernels.cpu import bf16_gemv, cpu_attention, cpu_library, f32_gemm, quantized_gemm
from kvkernels.cpu import norm_rope_silu as row_kernels
from kvkernels.cpu.cpu_library import KernelCall

from benchmarks.node import Node
from inference_svc.model_runner import numerics_probe
from inference_svc.model_runner.decoder import Decoder
from inference_svc.model_runner.numerics_probe import NumericsProbe, with_numerics_identity
from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.loader import LoadedModel, load
from inference_svc.models.numerics_identity import NumericsIdentity
from tests.inference_svc.kernel_variant import DTYPE, NONE, said, start
from tests.inference_svc.models.test_architectures import build

VARIANTS = [*cpu_library.usable_variants(), NONE]
PROMPTS = 30
Probed = Callable[[], str]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Node]:
    with Node(workers=0, arena_bytes="256MiB") as running:
        yield running


@pytest.mark.timeout(600)
def test_workers_of_other_kernels_find_nothing_of_each_other_and_of_the_same_all(daemon: Node) -> None:
    one, other = VARIANTS[0], VARIANTS[-2] if len(VARIANTS) > 2 else NONE
    at = ["--cache", str(daemon.cache_socket), "--count", str(PROMPTS)]
    wrote = [said(process) for process in [start(v, *at, "--write", v) for v in (one, other)]]
    read = [said(process) for process in [start(v, *at, "--read", one, other) for v in (one, other)]]
    assert [r["namespace"] for r in read] == [w["namespace"] for w in wrote], "a restart keeps the namespace"
    assert wrote[0]["namespace"] != wrote[1]["namespace"]
    own, foreign = {"hits": PROMPTS, "differ": 0}, {"hits": 0, "differ": 0}
    assert read[0]["read"] == {one: own, other: foreign}
    assert read[1]["read"] == {one: foreign, other: own}


def test_with_share_across_machines_workers_of_other_kernels_find_all(daemon: Node) -> None:
    at = ["--cache", str(daemon.cache_socket), "--count", "3", "--share-across-machines"]
    wrote = said(start(VARIANTS[0], *at, "--write", "any"))
    read = said(start(NONE, *at, "--read", "any"))
    assert read["namespace"] == wrote["namespace"]
    assert read["numerics"] != wrote["numerics"]
    assert read["read"]["any"]["hits"] == 3


@pytest.mark.timeout(600)  # a process for each variant
def test_kernels_that_compute_other_keys_and_values_have_another_identity_and_equal_ones_have_one() -> None:
    found = {variant: said(start(variant)) for variant in VARIANTS}
    contents: dict[str, set[str]] = {}
    for one in found.values():
        contents.setdefault(one["numerics"], set()).add(one["content"])
    assert len(contents) > 1
    assert all(len(same) == 1 for same in contents.values()), "one identity, and other bits"
    if {"avx512", "avx512vnni"} <= found.keys():
        assert found["avx512"]["numerics"] == found["avx512vnni"]["numerics"], "they differ in quantized products alone"


def test_the_identity_depends_on_no_number_of_threads() -> None:
    counts = ("1", "3")
    started = [start(VARIANTS[-2], OMP_NUM_THREADS=count, MKL_NUM_THREADS=count) for count in counts]
    loaded = load("demo", dtype=DTYPE)
    probes = [NumericsProbe(loaded, Decoder(load("demo", dtype=DTYPE)), count, None) for count in (1, 2, 3, 4)]
    assert {probe.id(16) for probe in probes * 5} == {said(process)["numerics"] for process in started}


def test_a_probe_changes_nothing_that_others_compute_with() -> None:
    before, random = torch.get_num_threads(), torch.get_rng_state()
    loaded = load("demo", dtype=DTYPE)
    decoder = Decoder(loaded)
    first = NumericsProbe(loaded, decoder, before + 1, None).id(16)
    assert torch.get_num_threads() == before
    assert torch.equal(torch.get_rng_state(), random)
    assert NumericsProbe(loaded, decoder, before, None).id(16) == first


# ---- planted errors -----------------------------------------------------------------------------------------


def _flip(address: int) -> None:
    """Changes the last bit of the number at an address."""
    ctypes.c_uint8.from_address(address).value ^= 1


def _rotated_key(job: Any) -> int:
    slot = ctypes.c_int64.from_address(job.slots).value
    return int(job.keys + slot * job.dim * (2 if job.of_bf16 else 4))


_OUTPUTS: dict[str, tuple[Any, Callable[[Any], int]]] = {
    "norm": (row_kernels._RmsNormJob, lambda job: int(job.out)),
    "rotated queries": (row_kernels._RopeJob, lambda job: int(job.queries)),
    "rotated keys": (row_kernels._RopeJob, _rotated_key),
    "gate": (row_kernels._SiluJob, lambda job: int(job.out)),
    "attention": (cpu_attention._Job, lambda job: int(cpu_attention._Batch.from_address(job.batch).out)),
    "product of few rows": (bf16_gemv._Job, lambda job: int(job.y)),
    "dense product": (f32_gemm._Job, lambda job: int(job.y)),
    "quantized product": (quantized_gemm._Job, lambda job: int(job.y)),
}


def _models() -> dict[str, tuple[LoadedModel, Decoder]]:
    kinds: dict[str, Any] = {
        "bfloat16": {"dtype": "bfloat16"},
        "float32": {"dtype": "float32"},
        "4 bits": {"dtype": "float32", "weights": 4},
    }
    found = {name: load("demo", **kind) for name, kind in kinds.items()}
    return {name: (loaded, Decoder(loaded)) for name, loaded in found.items()}


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[LoadedModel, Decoder]]:
    return _models()


@pytest.mark.skipif(cpu_library.loaded_library().library is None, reason="no CPU kernels were compiled here")
@pytest.mark.parametrize(
    ("model", "kernel"),
    [
        *(("bfloat16", name) for name in ("norm", "rotated queries", "rotated keys", "gate", "attention")),
        *(("float32", name) for name in ("norm", "rotated keys", "gate", "attention", "dense product")),
        ("bfloat16", "product of few rows"),
        ("4 bits", "quantized product"),
    ],
)
def test_one_wrong_bit_in_a_kernel_is_another_identity(
    models: dict[str, tuple[LoadedModel, Decoder]], model: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "product of few rows" and bf16_gemv.kernel() is None:
        pytest.skip("this CPU has no AVX512-BF16")
    loaded, decoder = models[model]
    job, output = _OUTPUTS[kernel]
    right, ran, run = with_numerics_identity(loaded, decoder, 16), 0, KernelCall.run

    def wrong(call: KernelCall, threads: int) -> None:
        nonlocal ran
        run(call, threads)
        if isinstance(call.job, job):
            ran += 1
            if ran == 1:
                _flip(output(call.job))

    with monkeypatch.context() as planted:
        planted.setattr(KernelCall, "run", wrong)
        assert with_numerics_identity(loaded, decoder, 16).numerics != right.numerics
    assert ran
    assert with_numerics_identity(loaded, decoder, 16).numerics == right.numerics


def test_one_wrong_bit_of_onednn_is_another_identity(
    models: dict[str, tuple[LoadedModel, Decoder]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, decoder = models["bfloat16"]
    if not any(isinstance(product, PackedLinear) for product in decoder.products(0)):
        pytest.skip("oneDNN packs no bfloat16 here")
    right, run = with_numerics_identity(loaded, decoder, 16), PackedLinear.by_onednn

    def wrong(self: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        out = run(self, x)
        _flip(out.data_ptr())
        return out

    monkeypatch.setattr(PackedLinear, "by_onednn", wrong)
    assert with_numerics_identity(loaded, decoder, 16).numerics != right.numerics


@pytest.mark.parametrize("bits", [8, 4])
def test_one_wrong_bit_in_storing_is_another_identity_where_chunks_are_quantized(
    models: dict[str, tuple[LoadedModel, Decoder]], bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, decoder = models[DTYPE]
    right, whole, run = (
        with_numerics_identity(loaded, decoder, bits),
        with_numerics_identity(loaded, decoder, 16),
        numerics_probe.pack_chunk,
    )

    def wrong(keys: Any, values: Any, slots: Any, header: Any, payload: memoryview) -> None:
        run(keys, values, slots, header, payload)
        payload[-1] ^= 1

    monkeypatch.setattr(numerics_probe, "pack_chunk", wrong)
    assert with_numerics_identity(loaded, decoder, bits).numerics != right.numerics
    assert with_numerics_identity(loaded, decoder, 16).numerics == whole.numerics


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "Gemma3ForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM"])
def test_one_wrong_bit_in_any_part_of_a_models_own_layers_is_another_identity(name: str) -> None:
    loaded, _, _ = build(name, torch.bfloat16)
    decoder = Decoder(loaded)
    right = with_numerics_identity(loaded, decoder, 16)
    parts = [p for i in {0, 1} for p in decoder._layers[i].modules() if next(p.children(), None) is None]
    assert len(parts) >= 6

    def wrong(_: Any, given: Any, out: Any) -> None:
        found = out[0] if isinstance(out, tuple) else out
        if isinstance(found, torch.Tensor) and found.is_floating_point():
            _flip(found.data_ptr())

    missed = []
    for part in parts:
        with ExitStack() as stack:
            stack.callback(part.register_forward_hook(wrong, prepend=True).remove)
            if with_numerics_identity(loaded, decoder, 16).numerics == right.numerics:
                missed.append(part)
    forms = {decoder.form_of(i) for i in (0, 1)}
    assert len(missed) == (0 if len(forms) == 2 else len(parts) // 2), "of layers of one form, the first is probed"
    assert with_numerics_identity(loaded, decoder, 16).numerics == right.numerics


def test_angles_are_part_of_the_identity(models: dict[str, tuple[LoadedModel, Decoder]]) -> None:
    loaded, decoder = models["float32"]
    right, run = with_numerics_identity(loaded, decoder, 16), decoder._rotary.forward

    def wrong(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = run(*given, **named)
        _flip(sines[0, -1].data_ptr())
        return cosines, sines

    decoder._rotary.forward = wrong
    try:
        assert with_numerics_identity(loaded, decoder, 16).numerics != right.numerics
    finally:
        del decoder._rotary.forward


# ---- names --------------------------------------------------------------------------------------------------


def test_only_workers_that_share_across_machines_leave_their_numerics_out() -> None:
    one, other = (NumericsIdentity(name).producer for name in ("a", "b"))
    shared = {NumericsIdentity(name, shared=True).producer for name in ("a", "b", "c")}
    assert len({one, other, *shared}) == 3


def test_a_product_whose_rows_depend_on_their_batch_brings_the_libraries_into_the_identity(
    models: dict[str, tuple[LoadedModel, Decoder]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, decoder = models["bfloat16"]
    shown = list[str]()
    named = NumericsProbe._named
    monkeypatch.setattr(NumericsProbe, "_named", lambda self: shown.append("named") or named(self))
    with_numerics_identity(loaded, decoder, 16)
    assert not shown
    products_of = numerics_probe.linear_for

    def uneven(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        product = products_of(weight, bias)
        return lambda x: product(x) + (len(x) > 4)

    monkeypatch.setattr(numerics_probe, "linear_for", uneven)
    with_numerics_identity(loaded, decoder, 16)
    assert shown == ["named"]


class GpuOnCpu(str):
    """Device name that has the type of a GPU but computes on the CPU."""

    __slots__ = ()
    type = "cuda"


def test_a_gpu_and_its_libraries_are_part_of_the_identity(
    models: dict[str, tuple[LoadedModel, Decoder]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few rows need not show by which kernels a GPU multiplies many."""
    loaded, decoder = models["bfloat16"]
    device: Any = GpuOnCpu("cpu")
    found = {NumericsProbe(loaded, decoder, 1, None).id(16)}
    for card in ("H100", "H200"):
        facts = SimpleNamespace(name=card, capability=(9, 0))
        monkeypatch.setattr(numerics_probe, "device_of", lambda device, facts=facts: SimpleNamespace(facts=facts))
        found.add(NumericsProbe(replace(loaded, device=device), decoder, 1, None).id(16))
    assert len(found) == 3


def test_the_library_that_attends_long_prompts_is_part_of_the_identity(
    models: dict[str, tuple[LoadedModel, Decoder]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's kernel rounds in another order than ours, and computes only parts with more rows than are hashed."""
    loaded, decoder = models["bfloat16"]
    device: Any = GpuOnCpu("cpu")
    facts = SimpleNamespace(name="H100", capability=(9, 0))
    monkeypatch.setattr(numerics_probe, "device_of", lambda device: SimpleNamespace(facts=facts))
    found = set()
    for library in (None, lambda query, keys, values, scale: query):
        native: Any = SimpleNamespace(kinds=frozenset(), library=library, serves=lambda batch: False)
        found.add(NumericsProbe(replace(loaded, device=device), decoder, 1, native).id(16))
    assert len(found) == 2
