"""EngineLost is raised whatever the failure is, also for errors without a text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import engine_lost
from inference_svc.model_runner.engine_lost import EngineLost, check_device
from inference_svc.model_runner.forward_batch import SequenceSlice
from inference_svc.models.loader import load
from inference_svc.tensor_parallel.parallel_decoder import ParallelDecoder


class SilentRanks:
    """Ranks to which nothing can be sent; the error does not say why."""

    def send(self, message: object) -> None:
        raise AssertionError

    def lost_reason(self) -> str:
        return "rank 1 ended"


class SilentDevice:
    """A device that fails and does not say why."""

    def synchronize(self) -> None:
        raise RuntimeError


def test_a_step_of_ranks_that_fails_without_a_text() -> None:
    loaded = load("demo", device="cpu", dtype="float32")
    ranks: Any = SilentRanks()
    decoder = ParallelDecoder(loaded, ranks)
    pool = KVPool(loaded.layers, loaded.kv_heads, loaded.head_dim, 128, loaded.dtype, loaded.device)
    table = pool.allocate(1)
    assert table is not None
    with pytest.raises(EngineLost, match=r"^rank 1 ended \(AssertionError\)$"):
        decoder.compute([SequenceSlice([7], 0, table, True)], pool)


def test_a_device_that_fails_without_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_lost, "is_device", lambda device: True)
    monkeypatch.setattr(engine_lost, "device_of", lambda device: SilentDevice())
    with pytest.raises(EngineLost, match=r"^cuda:0 computes no more: RuntimeError$"):
        check_device(torch.device("cuda", 0), RuntimeError("a step failed"))
