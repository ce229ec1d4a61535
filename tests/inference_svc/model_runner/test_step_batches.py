"""Step batches: the batch of a step equals one built anew, whether the last batch moved on or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from inference_svc.kv_pool.block_table import PAGE_TOKENS, UNMAPPED, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.lora.lora_adapter import LoraAdapter
from inference_svc.model_runner.cpu_attention import prepare_attention
from inference_svc.model_runner.forward_batch import (
    Branch,
    CudaIndex,
    ForwardBatch,
    Segment,
    SequenceSlice,
    build_batch,
)
from inference_svc.model_runner.layerwise_load import LayerReadyEvent
from inference_svc.model_runner.step_batches import StepBatches

CPU = torch.device("cpu")
PAGES = 64


def a_pool() -> KVPool:
    return KVPool(1, 2, 16, PAGES * PAGE_TOKENS, torch.float32, CPU)


def decoding(*tables: BlockTable, at: int, **changed: Any) -> list[SequenceSlice]:
    """One token of each table's sequence, at positions from ``at`` on."""
    return [SequenceSlice([7 + at + i], at + 10 * i, table, True, **changed) for i, table in enumerate(tables)]


def contents(of: object, skip: tuple[str, ...] = ("attention", "masks")) -> dict[str, object]:
    """Fields of a batch or segment, with tensors as lists."""

    def plain(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, list):
            return [contents(one) for one in value]
        return value

    assert isinstance(of, (ForwardBatch, Segment))
    return {field.name: plain(getattr(of, field.name)) for field in fields(of) if field.name not in skip}


def expect_as_built(made: ForwardBatch, slices: list[SequenceSlice], pool: KVPool) -> None:
    assert contents(made) == contents(build_batch(slices, pool, CPU))


@pytest.mark.parametrize("sequences", [1, 3])
def test_decoding_sequences_keep_their_batch_across_blocks_and_padded_lengths(sequences: int) -> None:
    pool, batches = a_pool(), StepBatches(CPU)
    tables = [BlockTable([(20 * i, 20)]) for i in range(sequences)]
    first = batches.next(decoding(*tables, at=480), pool)
    for at in range(480, 530):
        slices = decoding(*tables, at=at)
        made = first if at == 480 else batches.next(slices, pool)
        assert made is first
        assert not any(segment.masks for segment in made.segments)
        expect_as_built(made, slices, pool)
        # As for this step's keys.
        made.segments[-1].masks[1, None] = torch.zeros(1)
        made.index = cast(tuple[CudaIndex, ...], ("locations",))


def test_prepared_attention_is_kept_until_a_sequence_begins_a_block() -> None:
    pool, batches = a_pool(), StepBatches(CPU)
    tables = BlockTable([(0, 4)]), BlockTable([(8, 4)])
    kept = []
    for at in range(16, 60):
        batch = batches.next(decoding(*tables, at=at), pool)
        if batch.attention is None:
            kept.append(at)
            batch.attention = prepare_attention(batch, 2)
    # The first sequence begins a block at 32; the second, 10 tokens ahead, at 32 and 64.
    assert kept == [16, 22, 32, 54]


def a_branch(table: BlockTable) -> Branch:
    return Branch([5], 41, 0, 1, table)


def released(table: BlockTable) -> None:
    table.ranges = [(UNMAPPED, 1), (table.ranges[0][0] + 1, table.ranges[0][1] - 1)]


def moved(table: BlockTable) -> None:
    table.ranges = [(table.ranges[0][0] + 8, table.ranges[0][1])]


def scattered(table: BlockTable) -> None:
    table.ranges = [(table.ranges[0][0], 2), (40, 2)]


@pytest.mark.parametrize("change", [released, moved, scattered])
def test_a_batch_is_built_anew_after_a_tables_blocks_have_changed(change: Callable[[BlockTable], None]) -> None:
    pool, batches, table = a_pool(), StepBatches(CPU), BlockTable([(0, 4)])
    first = batches.next(decoding(table, at=40), pool)
    change(table)
    slices = decoding(table, at=41)
    made = batches.next(slices, pool)
    assert made is not first
    expect_as_built(made, slices, pool)


TABLE, OTHER = BlockTable([(0, 4)]), BlockTable([(4, 4)])
LOADING = cast(LayerReadyEvent, SimpleNamespace(complete=False))
ADAPTER = cast(LoraAdapter, SimpleNamespace())


@pytest.mark.parametrize(
    "slices",
    [
        decoding(TABLE, at=42),
        decoding(TABLE, at=40),
        decoding(OTHER, at=41),
        decoding(TABLE, OTHER, at=41),
        decoding(TABLE, at=41, num_scored=1),
        decoding(TABLE, at=41, branches=(a_branch(OTHER),)),
        decoding(TABLE, at=41, gate=LOADING),
        decoding(TABLE, at=41, adapter=ADAPTER),
        [SequenceSlice([1, 2], 41, TABLE, True, num_drafted=1)],
        [replace(decoding(TABLE, at=41)[0], wants_logits=False)],
        [replace(decoding(TABLE, at=41)[0], positions=torch.tensor([41]).numpy())],
    ],
    ids="skipped again other joined scored branch loading adapter draft prompt positions".split(),
)
def test_only_the_next_tokens_of_the_same_sequences_keep_a_batch(slices: list[SequenceSlice]) -> None:
    pool, batches = a_pool(), StepBatches(CPU)
    first = batches.next(decoding(TABLE, at=40), pool)
    made = batches.next(slices, pool)
    assert made is not first
    expect_as_built(made, slices, pool)


def test_a_batch_that_waits_for_a_load_is_not_kept() -> None:
    class LoadedMeanwhile:
        """Is complete from the second question on."""

        asked = 0

        @property
        def complete(self) -> bool:
            self.asked += 1
            return self.asked > 1

    pool, batches = a_pool(), StepBatches(CPU)
    first = batches.next(decoding(TABLE, at=40, gate=cast(LayerReadyEvent, LoadedMeanwhile())), pool)
    assert first.gates
    slices = decoding(TABLE, at=41)
    made = batches.next(slices, pool)
    assert made is not first
    expect_as_built(made, slices, pool)


def test_a_batch_belongs_to_one_pool_and_keys_read_in_place_lie_inside_it() -> None:
    pool, other, batches = a_pool(), a_pool(), StepBatches(CPU)
    first = batches.next(decoding(TABLE, at=40), pool)
    assert batches.next(decoding(TABLE, at=41), other) is not first

    last = BlockTable([(PAGES - 1, 17)])  # its 513 keys are contiguous, but 1,024 padded ones pass the pool's end
    assert batches.next(decoding(last, at=511), pool).segments[0].first_slot is not None
    slices = decoding(last, at=512)
    made = batches.next(slices, pool)
    assert made.segments[0].first_slot is None
    expect_as_built(made, slices, pool)
