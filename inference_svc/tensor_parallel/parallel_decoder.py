"""Decoder and KV pool of rank 0, which send each operation to the other ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
from kvsidecar.errors import Unavailable, first_line
from numpy.typing import NDArray
from torch import Tensor

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.decoder import Decoder
from inference_svc.model_runner.engine_lost import EngineLost
from inference_svc.model_runner.forward_batch import SequenceSlice, build_batch
from inference_svc.models.loader import LoadedModel
from inference_svc.tensor_parallel.rank_messages import (
    Checked,
    CheckFinite,
    Compute,
    CopySlots,
    SliceMessage,
    ZeroSlots,
)
from inference_svc.tensor_parallel.rank_processes import RankProcesses


class ParallelDecoder(Decoder):
    """Computes steps together with the other ranks."""

    recordable = False  # all ranks would have to record at the same time

    def __init__(self, loaded: LoadedModel, ranks: RankProcesses) -> None:
        super().__init__(loaded)
        self._ranks = ranks

    def compute(self, slices: list[SequenceSlice], pool: KVPool) -> Tensor:
        """Computes the logits ``[wanted, vocabulary]`` of a step.

        Raises EngineLost after any failure, because the ranks are then at different places of the step.
        """
        batch = build_batch(slices, pool, self._device)
        try:
            self._ranks.send(Compute([SliceMessage.of(piece) for piece in slices]))
            return self(batch)
        except Exception as error:
            raise EngineLost(f"{self._ranks.lost_reason()} ({first_line(error)})") from error


class ParallelKVPool(KVPool):
    """The pool of rank 0, which sends each copy and zeroing of slots to the other ranks."""

    def __init__(self, ranks: RankProcesses, *shape: Any, **settings: Any) -> None:
        super().__init__(*shape, **settings)
        self._ranks = ranks

    def copy_slots(self, source: int, target: int, count: int) -> None:
        self._ranks.send(CopySlots([source], [target], count))
        super().copy_slots(source, target, count)

    def copy_scattered(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        self._ranks.send(CopySlots(source.tolist(), target.tolist()))
        super().copy_scattered(source, target)

    def zero_slots(self, slots: NDArray[np.int64]) -> None:
        self._ranks.send(ZeroSlots(slots.tolist()))
        super().zero_slots(slots)

    def zero_range(self, first: int, count: int) -> None:
        self._ranks.send(ZeroSlots([first], count))
        super().zero_range(first, count)

    def are_finite(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns for each slot whether its keys and values are finite in all ranks."""
        asked = self._ranks.ask_all(CheckFinite(slots.tolist()))
        found = super().are_finite(slots)
        try:
            answers = asked.result()
        except Unavailable as error:
            raise EngineLost(str(error)) from error
        for answer in answers:
            assert isinstance(answer, Checked)
            found &= np.array(answer.finite, bool)
        return found
