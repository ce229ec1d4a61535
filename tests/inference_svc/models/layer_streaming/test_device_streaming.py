"""Layers streamed to a device compute what resident ones do there, with every slot poisoned after its last use."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvkernels.cpu import quantized_gemm
from kvsidecar.errors import ConfigurationError
from torch import Tensor

from inference_svc.models import loader, random_models
from inference_svc.models.layer_streaming import weight_placement
from inference_svc.models.layer_streaming.device_slots import DeviceSlots
from inference_svc.models.layer_streaming.pinned_pieces import ResidentPieces, RingPieces
from inference_svc.models.layer_streaming.residency_plan import OFF, StreamingOptions
from inference_svc.models.layer_streaming.weight_placement import DevicePlacement, Extent
from inference_svc.models.loader import DEMO_MODEL, LoadedModel, load
from inference_svc.server import pool_builder
from inference_svc.server.worker_config import WorkerConfig
from tests.inference_svc.models.layer_streaming.conftest import computed
from tests.inference_svc.models.test_device_weights import saved
from tests.kvkernels.device.device_fault import UnorderedAccess
from tests.kvkernels.device.simulated_device import SimulatedDevice, use_of
from tests.kvkernels.device.simulated_stream import Schedule
from tests.kvkernels.device.simulated_tensor import add_simulated_device
from tests.kvkernels.device.virtual_clock import COMPUTE, TO_DEVICE
from tests.kvkernels.doubles.card import H100, T4

KINDS = [("float32", 16), ("bfloat16", 16), ("float16", 16), ("float32", 8), ("bfloat16", 4)]
MODEL, LAYERS = "shape:tiny", 3
PIECE_BYTES = (1 << 20) + 1
FULL = StreamingOptions("full_stream", slots=2, poison_freed_slots=True)
MODES = {
    "full": FULL,
    "ffn": replace(FULL, mode="ffn_only_stream", slots=3),
    "partial": replace(FULL, mode="partial_resident", keep_first=1),
    "all kept": replace(FULL, mode="partial_resident", keep_first=LAYERS),
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    """A device that the loader accepts by its name; its work runs only when a thread waits for it."""
    made = SimulatedDevice(schedule=Schedule.LATE)
    add_simulated_device(made)
    monkeypatch.setattr(loader, "pick_device", torch.device)
    yield made
    made.close()


def loaded_on(device: SimulatedDevice, dtype: str, bits: int, asked: StreamingOptions) -> LoadedModel:
    return load(MODEL, device=str(device.torch), dtype=dtype, weights=bits, stream=asked)


def results(loaded: LoadedModel) -> list[Tensor]:
    return [x.cpu() for x in computed(loaded)]


def resident_on(device: SimulatedDevice, dtype: str, bits: int) -> LoadedModel:
    """All weights in the device's memory; quantized ones come from the layer file."""
    return loaded_on(device, dtype, bits, OFF if bits == 16 else MODES["all kept"])


@pytest.mark.parametrize(("dtype", "bits"), KINDS)
def test_streamed_layers_give_the_bits_of_the_resident_model(
    home: Path, device: SimulatedDevice, dtype: str, bits: int
) -> None:
    resident = resident_on(device, dtype, bits)
    want = results(resident)
    for name, asked in MODES.items() if (dtype, bits) == KINDS[0] else [("full", FULL)]:
        streamed = loaded_on(device, dtype, bits, asked)
        assert streamed.streamed is not None
        assert streamed.weights == resident.weights, "their keys and values are each other's"
        got = results(streamed)
        assert all(torch.isfinite(x).all() for x in got[:-1]), f"{name}: a slot was read behind its last use"
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), name
        streamed.streamed.close()


def test_a_device_answers_as_the_cpu(home: Path, device: SimulatedDevice) -> None:
    want = computed(load(MODEL, device="cpu", dtype="float32"))
    streamed = loaded_on(device, "float32", 16, FULL)
    for got, expected in zip(results(streamed)[:-1], want[:-1], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_scaled_embedding_that_is_also_the_head_is_loaded_once(
    home: Path, tmp_path: Path, device: SimulatedDevice
) -> None:
    saved(tmp_path, "Gemma2ForCausalLM")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / file, tmp_path / file)
    want = computed(load(str(tmp_path), device="cpu", dtype="float32"))
    streamed = load(str(tmp_path), device=str(device.torch), dtype="float32", stream=FULL)
    assert streamed.streamed is not None
    embedding, head = streamed.model.model.embed_tokens, streamed.model.lm_head
    assert embedding.weight.data_ptr() == head.weight.data_ptr()
    for got, expected in zip(results(streamed)[:-1], want[:-1], strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    streamed.streamed.close()


@pytest.mark.parametrize("schedule", [Schedule.EAGER, Schedule.DELAYED])
def test_a_file_streams_through_a_pinned_ring_where_memory_is_short(
    home: Path, device: SimulatedDevice, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = results(resident_on(device, "float32", 16))
    device.schedule = schedule
    monkeypatch.setattr(weight_placement, "free_bytes", lambda limit: 64 << 20)
    monkeypatch.setattr(weight_placement, "_MORE_RING_SLOTS", 0)  # fewer than pieces
    streamed = loaded_on(device, "float32", 16, FULL)
    assert all(torch.equal(a, b) for a, b in zip(results(streamed), want, strict=True))
    assert streamed.streamed is not None
    streamed.streamed.close()


def three_pieces_in_two_slots(device: SimulatedDevice) -> DeviceSlots:
    file: Any = SimpleNamespace(read=lambda memory, at, go_on: len(memory))
    slots = [device.allocate(PIECE_BYTES) for _ in range(2)]
    extents = [Extent(i * PIECE_BYTES, PIECE_BYTES) for i in range(3)]
    return DevicePlacement(device).read_ahead(file, extents, slots, FULL)


@pytest.mark.parametrize(("more", "kind"), [(0, RingPieces), (3 * (1 << 20) - 3, ResidentPieces)])
def test_pieces_stay_pinned_only_if_their_rounded_sizes_fit(
    device: SimulatedDevice, more: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch locks 2 MiB for a piece of 1 MiB and a byte."""
    free = 3 * PIECE_BYTES + weight_placement._SPARE_BYTES + more
    monkeypatch.setattr(weight_placement, "free_bytes", lambda limit: free)
    layers = three_pieces_in_two_slots(device)
    assert type(layers._pieces) is kind
    layers.close()


def test_a_host_without_memory_for_the_pinned_ring_ends_the_start(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four pieces of 2 MiB."""
    monkeypatch.setattr(weight_placement, "free_bytes", lambda limit: (8 << 20) - 1)
    with pytest.raises(ConfigurationError, match=r"8\.0 MiB of pinned host memory .* stream_slots"):
        three_pieces_in_two_slots(device)


def test_the_next_step_finds_its_first_layers(home: Path, device: SimulatedDevice) -> None:
    streamed = loaded_on(device, "float32", 16, replace(FULL, poison_freed_slots=False))
    results(streamed)
    assert streamed.streamed is not None
    stats = streamed.streamed.stats
    assert stats.misses == 1, "the very first layer"
    assert stats.hits % LAYERS == LAYERS - 1
    streamed.streamed.close()


def test_auto_streams_what_a_card_has_no_room_for(home: Path, device: SimulatedDevice) -> None:
    auto = StreamingOptions("auto", slots=2)
    roomy = load(MODEL, device=str(device.torch), dtype="float32", stream=auto)
    assert roomy.streamed is None
    used, layer = device.used_bytes, sum(p.nbytes for p in roomy.model.model.layers[0].parameters())
    # The plan keeps 256 MiB free. All layers do not fit beside the first model, and two slots do.
    device.clock.costs = replace(device.clock.costs, memory_bytes=2 * used + (256 << 20) - layer // 2)
    tight = load(MODEL, device=str(device.torch), dtype="float32", stream=auto)
    assert tight.streamed is not None
    assert tight.streamed.residency.mode == "ffn_only_stream"
    assert device.free_bytes() >= 256 << 20
    tight.streamed.close()


@pytest.mark.parametrize("bits", [16, 8])
def test_no_file_is_written_for_a_model_that_cannot_fit(
    tmp_path: Path, device: SimulatedDevice, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its embedding and its head of 512 KiB each (8 bits: 290 KiB) are on the device in every mode."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setitem(random_models._SHAPES["tiny"][1], "tie_word_embeddings", False)
    device.clock.costs = replace(device.clock.costs, memory_bytes=(256 << 20) + (768 << 10))
    with pytest.raises(ConfigurationError, match="the model does not fit"):
        loaded_on(device, "bfloat16", bits, StreamingOptions("auto", slots=2))
    assert not list(tmp_path.rglob("*-layers/*"))


def test_the_largest_weight_in_codes_has_room_to_be_widened(home: Path, device: SimulatedDevice) -> None:
    """The head is the largest weight: widened, it takes more than a GiB in a model of 8 billion weights."""
    loaded = loaded_on(device, "bfloat16", 4, FULL)
    assert loaded.streamed is not None
    head = loaded.model.lm_head
    widened = quantized_gemm.dequantize(head.quantized, torch.bfloat16).nbytes
    assert loaded.streamed.residency.widened_bytes == widened
    config = WorkerConfig(model=MODEL)
    left, without = (pool_builder._left_for_pool(config, m, 0) for m in (loaded, replace(loaded, streamed=None)))
    assert without - left == widened
    loaded.streamed.close()


class Model:
    """A model whose weights are pieces of equal size, and whose steps are kernels that read them."""

    def __init__(self, device: SimulatedDevice, pieces: int, size_bytes: int, slots: int = 2) -> None:
        self.device, self.count = device, pieces
        source = ResidentPieces(device, [size_bytes] * pieces, lambda number, memory, go_on: len(memory))
        self.memory = [device.allocate(size_bytes) for _ in range(slots)]
        self.layers = DeviceSlots(device, source, self.memory)

    def step(self, rows: int, weights: int) -> None:
        """Run one forward pass over layers with ``weights`` weights each."""
        device = self.device
        for piece in range(self.count):
            slot = self.layers.acquire(piece)
            use = use_of(self.memory[slot], False)
            seconds = device.clock.kernel_seconds(2.0 * weights, 2.0 * rows * weights)
            device.enqueue(device.current_stream(), "a layer", [use], COMPUTE, seconds, lambda _: None)
            self.layers.release(piece)


@pytest.mark.parametrize("card", [H100, T4], ids=lambda card: card.name)
@pytest.mark.parametrize("slots", [2, 3])
def test_the_link_is_busy_at_512_rows(card: object, slots: int) -> None:
    """Layers of a 32B model at 4 bits: 500 million weights in 260 MB. No host synchronization, across steps."""
    device = SimulatedDevice(card=card, executes=False)  # type: ignore[arg-type]
    model = Model(device, pieces=8, size_bytes=260 << 20, slots=slots)
    for _ in range(4):
        model.step(rows=512, weights=500_000_000)
    clock = device.clock
    share = clock.busy[TO_DEVICE] / clock.time_of(model.layers._copies.name)
    assert share >= 0.95, f"{card}: the link was busy for {share:.3f} of the time"
    assert clock.num_host_waits == 0
    assert clock.num_enqueued[TO_DEVICE] == 4 * 8 + slots
    device.close()


@pytest.mark.parametrize("forgotten", ["ready", "free"])
def test_a_forgotten_event_is_reported(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimulatedDevice(executes=False)
    model = Model(device, pieces=4, size_bytes=1 << 20)
    stream = model.layers._copies if forgotten == "free" else device.default_stream()
    monkeypatch.setattr(stream, "wait", lambda event: None)
    with pytest.raises(UnorderedAccess):
        model.step(rows=1, weights=1000)
    device.close()


def test_layers_may_be_acquired_in_any_order(device: SimulatedDevice) -> None:
    """Selective recompute and probes visit layers out of order, and nested."""
    size, count = 1 << 14, 6
    content: Callable[[int], int] = lambda number: number + 1  # noqa: E731

    def read(number: int, memory: Tensor, go_on: Callable[[], bool]) -> int:
        memory.fill_(content(number))
        return len(memory)

    slots = [device.allocate(size) for _ in range(2)]
    layers = DeviceSlots(device, ResidentPieces(device, [size] * count, read), slots, poison=True)
    for piece in (0, 1, 5, 5, 2, 3, 0, 4, 5, 0, 1):
        slot = layers.acquire(piece)
        assert layers.acquire(piece) == slot
        assert int(slots[slot].max()) == int(slots[slot].min()) == content(piece)
        layers.release(piece)
        assert int(slots[slot][0]) == content(piece), "another acquisition holds it"
        layers.release(piece)
    layers.close()
