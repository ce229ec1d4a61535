"""Residency plans from sizes and free memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kvsidecar.errors import ConfigurationError
from kvsidecar.process import control_groups, free_memory

from inference_svc.models.layer_streaming import residency_plan, weight_placement
from inference_svc.models.layer_streaming.residency_plan import (
    StreamedPart,
    StreamingOptions,
    WeightSizes,
    plan_residency,
    reserved_bytes,
)
from inference_svc.models.loader import LoadedModel, load

MIB = 1 << 20
SIZES = WeightSizes([(10 * MIB, 30 * MIB)] * 8, 5 * MIB)


def free_for(weights: int, asked: StreamingOptions) -> int:
    return weights + reserved_bytes(asked)


def test_auto_keeps_everything_where_there_is_room() -> None:
    asked = StreamingOptions("auto", pool_bytes=7 * MIB)
    found = plan_residency(SIZES, free_for(SIZES.all, asked), asked)
    assert (found.mode, found.streamed_bytes, found.slots) == ("full_resident", 0, 0)
    assert found.resident_bytes == SIZES.all


def test_auto_streams_as_few_bytes_as_it_can() -> None:
    asked = StreamingOptions("auto", slots=2)
    found = plan_residency(SIZES, free_for(SIZES.all - 1, asked), asked)
    assert (found.mode, found.streamed_bytes) == ("partial_resident", 3 * 40 * MIB), "two slots and five layers"
    assert found.parts == (StreamedPart.NOTHING,) * 5 + (StreamedPart.ALL,) * 3
    assert found.resident_bytes == 5 * MIB + 7 * 40 * MIB
    found = plan_residency(SIZES, free_for((5 + 80 + 80) * MIB, asked), asked)
    assert found.mode == "ffn_only_stream" or found.streamed_bytes <= 8 * 30 * MIB
    found = plan_residency(SIZES, free_for((5 + 80) * MIB, asked), asked)
    assert (found.mode, found.streamed_bytes) == ("full_stream", 8 * 40 * MIB)


@pytest.mark.parametrize("room", range(85, 330, 9))
def test_auto_never_takes_more_than_there_is(room: int) -> None:
    asked = StreamingOptions("auto", slots=2, pool_bytes=3 * MIB)
    assert plan_residency(SIZES, free_for(room * MIB, asked), asked).resident_bytes <= room * MIB


def test_a_weight_that_is_widened_for_a_product_takes_memory_beside_the_plan() -> None:
    asked, sizes = StreamingOptions("auto"), replace(SIZES, widened=20 * MIB)
    assert plan_residency(sizes, free_for(SIZES.all + 20 * MIB, asked), asked).mode == "full_resident"
    assert plan_residency(sizes, free_for(SIZES.all + 20 * MIB - 1, asked), asked).mode != "full_resident"
    with pytest.raises(ConfigurationError, match=r"and 276.0 MiB to compute in"):
        plan_residency(sizes, 0, asked)


def test_what_cannot_fit_is_refused_with_the_numbers() -> None:
    asked = StreamingOptions("auto", slots=2, pool_bytes=9 * MIB)
    with pytest.raises(ConfigurationError, match=r"every layer streamed it takes 85.0 MiB .* 9.0 MiB of pool"):
        plan_residency(SIZES, free_for(84 * MIB, asked), asked)


def test_modes_by_name_are_taken_as_they_are_asked_for() -> None:
    plenty = 1 << 40
    found = plan_residency(SIZES, plenty, StreamingOptions("partial_resident", keep_first=2, keep_last=3, slots=2))
    assert found.parts == (StreamedPart.NOTHING,) * 2 + (StreamedPart.ALL,) * 3 + (StreamedPart.NOTHING,) * 3
    assert plan_residency(SIZES, plenty, StreamingOptions("ffn_only_stream")).streamed_bytes == 8 * 30 * MIB
    assert plan_residency(SIZES, plenty, StreamingOptions("full_stream")).streamed_bytes == 8 * 40 * MIB
    assert plan_residency(SIZES, plenty, StreamingOptions("partial_resident", keep_last=7, slots=9)).slots == 2
    with pytest.raises(ConfigurationError, match="keep_first is 5 and keep_last is 4; the model has 8 layers"):
        plan_residency(SIZES, 0, StreamingOptions("partial_resident", keep_first=5, keep_last=4))


@pytest.mark.parametrize(
    ("wish", "weights", "said"),
    [
        ("full_stream", 85, "even with every layer streamed it takes 85.0 MiB .* lower pool_bytes or weights"),
        ("ffn_only_stream", 145, "with --stream ffn_only_stream it takes 145.0 MiB .* --stream auto takes what fits"),
        ("partial_resident", 205, "with --stream partial_resident it takes 205.0 MiB"),
    ],
)
def test_a_mode_by_name_that_does_not_fit_is_refused(
    wish: residency_plan.StreamingMode, weights: int, said: str
) -> None:
    """The kernel kills a worker beyond a control group's limit without a message."""
    asked = StreamingOptions(wish, keep_first=3, slots=2, pool_bytes=9 * MIB)
    assert plan_residency(SIZES, free_for(weights * MIB, asked), asked).mode == wish
    with pytest.raises(ConfigurationError, match=said):
        plan_residency(SIZES, free_for(weights * MIB - 1, asked), asked)


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_control_group_counts(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test writes control groups of both versions, as the kernel shows them."""
    inner = (tmp_path if version == 2 else tmp_path / "memory") / "outer" / "inner"
    inner.mkdir(parents=True)
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
    limit, usage = names[version]
    (inner / limit).write_text("max\n" if version == 2 else "9223372036854771712\n")
    (inner / usage).write_text("7\n")
    outer = inner.parent
    (outer / limit).write_text("1000\n")
    (outer / usage).write_text("700\n")
    (outer / "memory.stat").write_text("anon 400\ninactive_file 200\nactive_file 50\n")
    status = tmp_path / "status"
    status.write_text("0::/outer/inner\n" if version == 2 else "5:cpu,memory:/outer/inner\n0::/\n")
    monkeypatch.setattr(control_groups, "_GROUPS", tmp_path)
    monkeypatch.setattr(control_groups, "_STATUS", status)
    assert free_memory.free_bytes() == 1000 - 700 + 250
    assert free_memory.free_bytes(allowed=free_memory.resident_bytes() - (1 << 20)) == 0


def test_what_is_allowed_counts_what_the_process_has() -> None:
    assert free_memory.free_bytes(allowed=1) == 0
    assert 0 < free_memory.free_bytes() < 1 << 50
    assert residency_plan.OFF.mode == "off"


def test_auto_streams_only_where_that_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the weights fit, the pool may be short; if they never fit, the loader writes no file."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    def load_with(free: int, pool_bytes: int) -> LoadedModel:
        monkeypatch.setattr(weight_placement, "free_bytes", lambda allowed=0: free)
        return load("demo", device="cpu", dtype="float32", stream=StreamingOptions("auto", pool_bytes=pool_bytes))

    weights = sum(p.numel() * 4 for p in load("demo", dtype="float32").model.parameters())
    spare = reserved_bytes(StreamingOptions())
    assert load_with(spare + 4 * weights, 8 * weights).streamed is None
    with pytest.raises(ConfigurationError, match="the model does not fit"):
        load_with(spare + weights // 8, 0)
    assert not list(tmp_path.rglob("weights.bin"))
