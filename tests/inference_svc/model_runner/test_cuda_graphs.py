"""Recorded decode steps give the logits of steps that run one by one, and hold nothing that a device could not record.

Our kernels run by the emulator; a recorder of the test's stands for the device's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from inference_svc.engine.engine import Engine
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.cuda_attention import CudaAttention
from inference_svc.model_runner.cuda_graphs import CudaGraphs, make_cuda_graphs
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.loader import LoadedModel
from inference_svc.sampling.sampling_params import SamplingParams
from inference_svc.sequence.generation_request import GenerationRequest
from inference_svc.sequence.kv_connector import NullKVConnector
from inference_svc.sequence.sequence import Sequence, SequenceOutput
from tests.inference_svc.model_runner.test_cuda_attention import CONFIGS, loaded
from tests.kvkernels.emulated.conftest import Emulated, library


class Recordable(TorchDispatchMode):
    """Refuses what waits for the device, or copies from memory that is gone when a recording is replayed."""

    REFUSED = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "_unique2", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in self.REFUSED:
            raise RuntimeError(f"{func} cannot be recorded")
        return func(*args, **(kwargs or {}))


class Replaying:
    """Runs a step again, and counts how many it was given."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1
        with Recordable():
            step()
        return step


class Refusing:
    def __init__(self) -> None:
        self.asked = 0

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.asked += 1
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture(scope="module")
def emulated() -> Emulated:
    return library()


@pytest.fixture
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    monkeypatch.setattr("inference_svc.models.fused_layer_weights.can_fuse_model", lambda model: False)
    return loaded(getattr(request, "param", "Qwen3ForCausalLM"))


def filled(model: LoadedModel, kernels: Emulated, decoder: Decoder) -> tuple[KVPool, list[BlockTable], list[int]]:
    """A pool with three sequences of 5, 70 and 33 tokens."""
    pool = KVPool(model.layers, model.kv_heads, model.head_dim, 1024, torch.bfloat16, model.device)
    pool.native = CudaAttention(kernels)
    tables, lengths = [], [5, 70, 33]
    generator = torch.Generator().manual_seed(2)
    for length in lengths:
        table = pool.allocate(100)
        assert table is not None
        ids = torch.randint(0, 300, (length,), generator=generator).tolist()
        decoder(forward_batch.build_batch([forward_batch.SequenceSlice(ids, 0, table, True)], pool, model.device))
        tables.append(table)
    return pool, tables, lengths


@pytest.mark.parametrize("model", CONFIGS, indirect=True)
def test_replayed_steps_give_the_same_logits(emulated: Emulated, model: LoadedModel) -> None:
    decoder, recorder = Decoder(model), Replaying()
    pool, tables, lengths = filled(model, emulated, decoder)
    graphs = CudaGraphs(decoder, pool, recorder, 8)
    for step, chosen in enumerate([[1], [0, 1, 2], [2, 0, 1], [1], [0], [0, 2]]):
        spans = [forward_batch.SequenceSlice([7 + step + i], lengths[i], tables[i], True) for i in chosen]
        expected = decoder(forward_batch.build_batch(spans, pool, model.device)).clone()
        for i in chosen:  # what the step wrote is written anew
            slots = torch.from_numpy(tables[i].slots(lengths[i], lengths[i] + 1))
            pool.keys.index_fill_(2, slots, 0)
        assert graphs.serves(spans)
        found = graphs(spans)
        assert found is not None
        torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)
        for i in chosen:
            lengths[i] += 1
    assert recorder.recorded == 3, "one recording for 1, 2 and 4 sequences each"


def test_what_is_no_plain_decode_step_is_not_served(emulated: Emulated, model: LoadedModel) -> None:
    decoder = Decoder(model)
    pool, tables, _ = filled(model, emulated, decoder)
    graphs = CudaGraphs(decoder, pool, Replaying(), 2)
    one = forward_batch.SequenceSlice([1], 5, tables[0], True)
    assert graphs.serves([one, one])
    assert not graphs.serves([one] * 3), "more sequences than were asked for"
    assert not graphs.serves([forward_batch.SequenceSlice([1, 2], 5, tables[0], True)])
    assert not graphs.serves([forward_batch.SequenceSlice([1], 5, BlockTable([(9, 1), (4, 1)]), True)])
    pool.native = CudaAttention(emulated, frozenset({"prefill"}))
    assert not graphs.serves([one]), "torch attends"
    assert make_cuda_graphs(decoder, pool, 8) is None, "no CUDA device"


def test_a_device_that_refuses_is_asked_once(emulated: Emulated, model: LoadedModel) -> None:
    decoder, recorder = Decoder(model), Refusing()
    pool, tables, _ = filled(model, emulated, decoder)
    graphs = CudaGraphs(decoder, pool, recorder, 8)
    spans = [forward_batch.SequenceSlice([1], 5, tables[0], True)]
    assert graphs(spans) is None
    assert not graphs.serves(spans)
    assert recorder.asked == 1


class NoText:
    """The random model has no tokenizer."""

    stopped = False

    def push(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def generated(model: LoadedModel, kernels: Emulated) -> list[list[int]]:
    """What an engine answers to three prompts at once."""
    pool = KVPool(model.layers, model.kv_heads, model.head_dim, 1024, torch.bfloat16, model.device)
    pool.native = CudaAttention(kernels)
    engine, done = Engine(model, pool, NullKVConnector()), threading.Semaphore(0)

    def sink(output: SequenceOutput) -> None:
        if output.stored_tokens is not None:
            done.release()

    sequences = []
    for length in (5, 40, 9):
        prompt, params = list(range(3, 3 + length)), SamplingParams(temperature=0.0)
        text: Any = NoText()
        sequences.append(Sequence(GenerationRequest(str(length), length, 6, params, frozenset()), prompt, text, sink))
    try:
        for sequence in sequences:
            engine.submit(sequence)
        assert all(done.acquire(timeout=60) for _ in sequences)
        engine.check_integrity()
    finally:
        engine.stop()
    return [sequence.tokens for sequence in sequences]


def test_an_engine_answers_the_same_by_recordings(
    emulated: Emulated, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, recorder = generated(model, emulated), Replaying()

    def recording(decoder: Decoder, pool: KVPool, most: int) -> CudaGraphs:
        return CudaGraphs(decoder, pool, recorder, most)

    monkeypatch.setattr("inference_svc.engine.engine.make_cuda_graphs", recording)
    assert generated(model, emulated) == expected
    assert recorder.recorded > 0
