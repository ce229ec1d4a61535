"""The stream of copies: the work that it waits for, and the thread's stream afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from kvkernels.cuda import copy_engine
from kvkernels.cuda.copy_engine import CudaCopyEngine


class Stream:
    """A stream that notes what it waits for."""

    def __init__(self, name: str, waited: list[str]) -> None:
        self.name, self._waited = name, waited

    def wait_stream(self, other: Stream) -> None:
        self._waited.append(f"{self.name} waits for {other.name}")


class FakeCuda:
    """The parts of ``torch.cuda`` that a copy engine uses. The thread is on a stream of its own."""

    def __init__(self) -> None:
        self.waited = list[str]()
        self._default, self.now = Stream("default", self.waited), Stream("thread", self.waited)

    def Stream(self, device: torch.device) -> Stream:
        return Stream("copies", self.waited)

    def default_stream(self, device: torch.device) -> Stream:
        return self._default

    def current_stream(self, device: torch.device) -> Stream:
        return self.now

    def device(self, device: torch.device) -> nullcontext[None]:
        return nullcontext()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


def test_copies_come_after_the_engine_and_after_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that is stored is that of the last step; a load does not overwrite what a step still reads."""
    cuda = FakeCuda()
    monkeypatch.setattr(copy_engine, "torch", SimpleNamespace(cuda=cuda))
    engine = CudaCopyEngine(torch.device("cuda", 0))
    with engine.ordered():
        assert cuda.waited == ["copies waits for default", "copies waits for thread"]
        assert cuda.now.name == "copies"
    assert cuda.now.name == "thread"
