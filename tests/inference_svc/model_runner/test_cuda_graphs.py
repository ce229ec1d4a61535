"""Recorded decode steps give the logits of steps that run one by one, and hold nothing that a device could not record.

The emulator runs our kernels; a recorder of the test replaces the device's.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvkernels.cuda.cuda_library import KernelLaunchError
from kvkernels.device.cuda_device import CudaDevice
from kvkernels.device.cuda_graph_recorder import CudaGraphRecorder
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from inference_svc.engine.engine import Engine
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import cuda_graphs, forward_batch
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
    """Raises for operations that wait for the device, or that copy from memory that is freed before a replay."""

    REFUSED = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "_unique2", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in self.REFUSED:
            raise RuntimeError(f"{func} cannot be recorded")
        return func(*args, **(kwargs or {}))


class Replaying:
    """Recorder that runs a step again instead of replaying it, and counts the recorded steps."""

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


def test_a_recording_without_memory_leaves_the_others(
    emulated: Emulated, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Replaying):
        full = False

        def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
            if self.full:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().record(step)

    decoder, recorder, seconds = Decoder(model), Full(), 0.0
    monkeypatch.setattr("inference_svc.model_runner.cuda_graphs.time", SimpleNamespace(monotonic=lambda: seconds))
    pool, tables, lengths = filled(model, emulated, decoder)
    graphs = CudaGraphs(decoder, pool, recorder, 8)
    spans = [forward_batch.SequenceSlice([1], n, table, True) for n, table in zip(lengths, tables, strict=True)]
    expected = graphs(spans[:1])
    assert expected is not None
    recorder.full = True
    assert graphs(spans) is None
    assert not graphs.serves(spans), "an attempt at every step would double its time"
    assert graphs.serves(spans[:1])
    found = graphs(spans[:1])
    assert found is not None
    assert torch.equal(found, expected)
    assert recorder.recorded == 1, "the first recording is kept"
    recorder.full, seconds = False, seconds + cuda_graphs._RETRY_SECONDS
    assert graphs.serves(spans)
    assert graphs(spans) is not None


class NoText:
    """Substitute of the tokenizer, because the random model has none."""

    stopped, text_offset = False, 0

    def push(self, token: int, has_text: bool = True) -> str:
        return ""

    def finish(self) -> str:
        return ""


def generated(model: LoadedModel, kernels: Emulated) -> list[list[int]]:
    """Return an engine's tokens for three simultaneous prompts."""
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


class FakeGraph:
    """The part of ``torch.cuda.CUDAGraph`` that a recorder uses."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        """Count the graph as a user of the pool; torch refuses a pool whose last graph is gone."""
        cuda = self._cuda
        if cuda.pool_users.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        cuda.captures += 1
        cuda.cached_at_captures.append(cuda.cached_bytes)
        cuda.pool_users[pool] = cuda.pool_users.get(pool, 0) + 1
        weakref.finalize(self, lambda: cuda.pool_users.update({pool: cuda.pool_users[pool] - 1}))

    def capture_end(self) -> None:
        if self._cuda.capture_fails:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None:
        pass


class FakeCuda:
    """The parts of ``torch.cuda`` that a recorder uses. A capture fails, either in the step or at its end."""

    def __init__(self, capture_fails: bool) -> None:
        self.stream_now, self.captures, self.capture_fails = "default", 0, capture_fails
        self.pool_users: dict[tuple[int, int], int] = {}
        self._pools, self._handles = itertools.count(1), itertools.cycle(range(32))
        self.cached_bytes, self.cached_at_captures = 0, list[int]()
        self.used: set[int] = set()  # handles of streams that were current

    def Stream(self, device: object = None) -> Any:
        """Return the next stream of the device's 32, as torch does."""
        handle = next(self._handles)
        return SimpleNamespace(
            name="side", cuda_stream=handle, wait_stream=lambda other: None, synchronize=lambda: None
        )

    def current_stream(self) -> Any:
        return SimpleNamespace(name=self.stream_now, wait_stream=lambda other: None)

    def CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream.name
        self.used.add(stream.cuda_stream)
        try:
            yield
        finally:
            self.stream_now = before

    def empty_cache(self) -> None:
        self.cached_bytes = 0

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, next(self._pools)

    def device(self, device: object) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def get_device_capability(self, device: object) -> tuple[int, int]:
        return 8, 0


def recorder_on(cuda: FakeCuda) -> CudaGraphRecorder:
    recorder = CudaGraphRecorder(torch.device("cuda", 0))
    recorder._cuda = cuda
    return recorder


@pytest.mark.parametrize("where", ["the step", "the end"])
def test_a_failed_capture_leaves_the_thread_on_its_stream(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are ordered after the engine's stream: an engine on another one would read keys that are not there yet."""
    cuda, runs, ended = FakeCuda(capture_fails=True), 0, list[object]()
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda device, memory: ended.append((device, memory)), raising=False
    )

    def step() -> Tensor:
        nonlocal runs
        runs += 1
        assert cuda.stream_now == "side"
        if runs == 2 and where == "the step":
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="not permitted" if where == "the step" else "during capture"):
        recorder_on(cuda).record(step)
    assert cuda.stream_now == "default"
    assert cuda.captures == 1
    assert ended == [(0, (0, 1))], "blocks of several streams are used again"


def test_graphs_share_a_pool_as_long_as_one_of_them_lives() -> None:
    cuda = FakeCuda(capture_fails=False)
    recorder, step = recorder_on(cuda), lambda: torch.zeros(1)
    first, second = recorder.record(step), recorder.record(step)
    assert cuda.pool_users == {(0, 1): 2}
    del first
    third = recorder.record(step)
    assert cuda.pool_users == {(0, 1): 2}
    del second, third
    replay = recorder.record(step)
    assert cuda.pool_users == {(0, 1): 0, (0, 2): 1}, "torch refuses a pool without graphs"
    assert float(replay()) == 0.0


def test_a_capture_begins_without_cached_memory() -> None:
    """torch frees no cached memory during a capture, so the capture would fail on a device that is full of it."""
    cuda = FakeCuda(capture_fails=False)

    def step() -> Tensor:
        cuda.cached_bytes += 1 << 20
        return torch.zeros(1)

    recorder_on(cuda).record(step)
    assert cuda.cached_at_captures == [0]


def test_no_recording_uses_a_stream_of_the_chunk_loader() -> None:
    """A copy on a stream that is captured invalidates the capture, or is captured and never runs."""
    cuda = FakeCuda(capture_fails=False)
    device = CudaDevice(torch.device("cuda", 0))
    device._cuda, device._recorder = cuda, recorder_on(cuda)
    lanes = {device.stream().handle for _ in range(8)}
    for _ in range(40):
        device.record_graph(lambda: torch.zeros(1))
    assert len(lanes) == 8
    assert cuda.used
    assert not lanes & cuda.used


def read_on_host() -> Tensor:
    return torch.zeros(1) * torch.ones(1).item()


def grouped_product() -> Tensor:
    groups = torch.tensor([8, 16], dtype=torch.int32)
    return torch._grouped_mm(torch.ones(16, 16).bfloat16(), torch.ones(2, 16, 16).bfloat16(), offs=groups)


def copied_to_host() -> Tensor:
    return torch.zeros(1, device="meta").cpu()


@pytest.mark.parametrize("step", [read_on_host, grouped_product, copied_to_host])
def test_a_step_that_waits_for_the_device_is_never_captured(step: Callable[[], Tensor]) -> None:
    cuda = FakeCuda(capture_fails=False)
    with pytest.raises(RuntimeError, match=r"waits for the device|copies to the host"):
        recorder_on(cuda).record(step)
    assert cuda.captures == 0
    assert cuda.stream_now == "default"


def test_a_kernel_that_fails_is_not_a_refused_recording(emulated: Emulated, model: LoadedModel) -> None:
    decoder = Decoder(model)
    pool, tables, _ = filled(model, emulated, decoder)

    class Failing:
        def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
            raise KernelLaunchError("attention: invalid argument")

    graphs = CudaGraphs(decoder, pool, Failing(), 8)
    with pytest.raises(KernelLaunchError):
        graphs([forward_batch.SequenceSlice([1], 5, tables[0], True)])
