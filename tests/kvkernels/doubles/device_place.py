"""Places of a pool: doubles everywhere, and a GPU where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kvkernels import dispatch
from kvkernels.cuda.chunk_transfer import ChunkTransfer

from tests.kvkernels.doubles.queued_device import QueuedDevice
from tests.kvkernels.emulated.conftest import library

PLACES = ["doubles", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[QueuedDevice]:
    """The pool's device: our kernels by the emulator, copies by io_uring, all of it late."""
    queued = QueuedDevice(library())
    transfer = ChunkTransfer(queued)
    monkeypatch.setattr(dispatch.cpu_chunks, "serves", lambda keys: False)
    monkeypatch.setattr(dispatch, "_cuda_kernels", lambda pool, half: queued)
    monkeypatch.setattr(dispatch, "_transfer", lambda device, use: transfer)
    yield queued
    queued.close()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> torch.device:
    """Device of the pool; chunks cross over doubles or a real copy engine."""
    if request.param == "doubles":
        request.getfixturevalue("device")
        return torch.device("cpu")
    return torch.device("cuda", 0)


def keep_busy(place: torch.device) -> None:
    """Occupy a GPU's current stream for some milliseconds, so that work enqueued later is late."""
    if place.type == "cuda":
        cuda: Any = torch.cuda
        cuda._sleep(20_000_000)
