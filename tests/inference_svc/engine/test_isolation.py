"""One request's failure is its own: it ends with INTERNAL, and nobody beside it notices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from kvkernels.cpu import f32_gemm
from kvkernels.cpu.head_rows import Likeliest
from kvsidecar.errors import GenerationFailed, ModelUnsupported, status_of

from inference_svc.engine import speculative_sampler
from inference_svc.engine.engine import Engine
from inference_svc.engine.engine_stats import EngineLimits
from inference_svc.gateway.worker_retry import is_retryable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.models.loader import LoadedModel, load
from inference_svc.sampling.sampler import SampleResult
from inference_svc.sampling.sampling_state import SamplingState
from inference_svc.sequence.generation_request import CacheParams
from inference_svc.sequence.kv_connector import NullKVConnector
from inference_svc.sequence.sequence import FinishReason, Sequence
from tests.inference_svc.engine.test_exactness import prompt
from tests.inference_svc.server.test_load import Request, idle

POISON = 4090  # no prompt of these tests has it by chance: they end at 4000


class Refusing(NullKVConnector):
    """Raises errors for the sequences that the test chooses."""

    def __init__(self) -> None:
        self.load_fails = self.save_fails = self.probe_fails = ""

    def load(self, sequence: Sequence, pool: KVPool, done: Any) -> bool:
        if sequence.request.id == self.load_fails:
            raise OSError("the load was planted")
        return False

    def save(self, sequence: Sequence, pool: KVPool, done: Any) -> bool:
        if sequence.request.id == self.save_fails:
            raise OSError("the save was planted")
        return False

    def probe(self, sequence: Sequence, done: Any) -> None:
        if sequence.request.id == self.probe_fails:
            raise OSError("the probe was planted")


def poisoned() -> LoadedModel:
    """The built-in model, in which one token's embedding is NaN."""
    loaded = load("demo", dtype="float32")
    inner: Any = loaded.model.model
    weight = inner.embed_tokens.weight.detach().clone()  # the head keeps its own
    weight[POISON] = float("nan")
    inner.embed_tokens.weight = torch.nn.Parameter(weight, requires_grad=False)
    return loaded


@pytest.fixture(scope="module")
def cache() -> Refusing:
    return Refusing()


@pytest.fixture(scope="module")
def engine(cache: Refusing) -> Iterator[Engine]:
    loaded = poisoned()
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 8192, loaded.dtype, loaded.device)
    found = Engine(loaded, pool, cache, EngineLimits(max_num_batched_tokens=96))
    yield found
    idle(found)
    found.check_integrity()
    found.stop()


def others(engine: Engine, count: int = 6) -> list[Request]:
    requests = [Request(prompt(i, 20 + 5 * i), 12, seed=i if i % 2 else None) for i in range(count)]
    for request in requests:
        request.sequence.request = replace(request.sequence.request, cache=CacheParams(read=False, write=False))
        engine.submit(request.sequence)
    return requests


@pytest.fixture(scope="module")
def want(engine: Engine) -> list[list[int]]:
    return [r.tokens() for r in others(engine)]


def failure(request: Request) -> GenerationFailed:
    assert request.ended.wait(60)
    last = request.outputs[-1]
    assert last.finish is FinishReason.FAILED
    assert isinstance(last.error, GenerationFailed)
    return last.error


def test_nan_in_one_sequence_fails_that_one_alone(engine: Engine, want: list[list[int]]) -> None:
    """The prompt is longer than a step: NaN lies in the pool before any logits show it."""
    failed = engine.stats.failed
    bad = Request([*prompt(50, 10), POISON, *prompt(51, 230)], 5)
    engine.submit(bad.sequence)
    beside = others(engine)
    assert "NaN" in str(failure(bad))
    assert [r.tokens() for r in beside] == want
    assert engine.stats.failed == failed + 1
    idle(engine)
    assert torch.isfinite(engine.pool.keys).all()
    assert torch.isfinite(engine.pool.values).all(), "the next owner of these pages would read NaN"
    assert [r.tokens() for r in others(engine)] == want


def test_who_waits_is_told_even_where_pages_cannot_be_cleared(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is broken refuses that as well; the engine's thread ended, and everybody hung."""

    def broken(_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(engine.pool, "zero_exclusive", broken)
    bad = Request([POISON, 5], 5)
    engine.submit(bad.sequence)
    assert "NaN" in str(failure(bad))


def test_a_drawing_that_raises_for_the_batch_is_done_for_each_alone(
    engine: Engine, want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = speculative_sampler.sample

    def short_of_memory(
        logits: torch.Tensor, samplers: list[SamplingState], likeliest: Likeliest | None
    ) -> list[SampleResult]:
        if len(samplers) > 1:
            raise torch.OutOfMemoryError("rows times the vocabulary")
        return real(logits, samplers, likeliest)

    monkeypatch.setattr(speculative_sampler, "sample", short_of_memory)
    assert [r.tokens() for r in others(engine)] == want


@pytest.mark.skipif(f32_gemm.kernel() is None, reason="no variant of the kernels runs here")
def test_steps_of_greedy_answers_take_the_tokens_that_the_kernels_found(
    engine: Engine, want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []
    real = speculative_sampler.sample

    def watched(logits: torch.Tensor, samplers: list[SamplingState], likeliest: Likeliest | None) -> list[SampleResult]:
        given.append(likeliest is not None)
        return real(logits, samplers, likeliest)

    monkeypatch.setattr(speculative_sampler, "sample", watched)
    assert [r.tokens() for r in others(engine)] == want
    assert any(given)
    assert all(given[-3:]), "the last steps only decode"


def test_its_error_is_internal_and_not_for_another_worker(engine: Engine) -> None:
    bad = Request([POISON, 5], 5)
    engine.submit(bad.sequence)
    error = failure(bad)
    assert status_of(error)[0].name == "INTERNAL"
    assert status_of(error)[1] == 500
    assert not is_retryable(error)


def test_a_temperature_near_zero_fails_nobody(engine: Engine, want: list[list[int]]) -> None:
    cold, greedy = Request(prompt(60, 30), 8, seed=1), Request(prompt(60, 30), 8)
    cold.sequence.sampling.params = type(cold.sequence.request.sampling_params)(temperature=1e-38)
    engine.submit(cold.sequence)
    beside = others(engine)
    engine.submit(greedy.sequence)
    assert cold.tokens() == greedy.tokens()
    assert [r.tokens() for r in beside] == want


def test_a_forward_that_raises_fails_only_who_raises_alone(
    engine: Engine, want: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = engine.decoder.__class__.__call__

    def fails(decoder: Any, batch: Any) -> torch.Tensor:
        if (batch.tokens == POISON - 1).any():
            raise RuntimeError("a kernel gave up")
        return real(decoder, batch)

    monkeypatch.setattr(engine.decoder.__class__, "__call__", fails)
    bad = Request([*prompt(70, 20), POISON - 1], 5)
    engine.submit(bad.sequence)
    beside = others(engine)
    assert "RuntimeError: a kernel gave up" in str(failure(bad))
    assert [r.tokens() for r in beside] == want


def test_a_load_that_raises_fails_its_sequence_and_leaves_no_page(
    engine: Engine, cache: Refusing, want: list[list[int]]
) -> None:
    bad = Request(prompt(80, 100), 5)
    cache.load_fails = "unlucky"
    bad.sequence.request = replace(bad.sequence.request, id=cache.load_fails)
    engine.submit(bad.sequence)
    beside = others(engine)
    assert "the load was planted" in str(failure(bad))
    assert [r.tokens() for r in beside] == want
    idle(engine)
    engine.check_integrity()


def test_a_save_or_a_probe_that_raises_fails_nobody(engine: Engine, cache: Refusing) -> None:
    request = Request(prompt(90, 40), 5)
    cache.save_fails = cache.probe_fails = "unsaved"
    request.sequence.request = replace(request.sequence.request, id="unsaved", cache=CacheParams(read=False))
    engine.submit(request.sequence)
    assert len(request.tokens()) == 5
    idle(engine)
    assert request.outputs[-1].stored_tokens == 0


def test_a_sink_that_raises_ends_its_sequence_alone(engine: Engine, want: list[list[int]]) -> None:
    left = Request(prompt(95, 20), 500)

    def gone(output: Any) -> None:
        left.outputs.append(output)
        raise RuntimeError("the event loop is closed")

    left.sequence.sink = gone
    engine.submit(left.sequence)
    assert [r.tokens() for r in others(engine)] == want
    idle(engine)
    assert [o.finish for o in left.outputs] == [None, FinishReason.FAILED]


def test_a_failed_warm_up_ends_the_start_with_its_reason() -> None:
    loaded = load("demo", dtype="float32")
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 512, loaded.dtype, loaded.device)
    inner: Any = loaded.model.model
    inner.embed_tokens.weight = torch.nn.Parameter(torch.zeros(0, 64), requires_grad=False)
    with pytest.raises(ModelUnsupported, match="demo cannot run here: its first forward failed: RuntimeError"):
        Engine(loaded, pool, NullKVConnector())
