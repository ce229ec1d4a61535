"""Fixtures of the CUDA emulator, which is the CUDA sources compiled for the CPU."""

import ctypes
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvkernels.cuda import cuda_sources, emulator
from kvkernels.cuda.cuda_library import SharedLibrary

from tests.kvkernels.doubles.card import A100, V100, Card

_ORDERS = ("first warp first", "last warp first", "random order")
_LANDINGS = ("at wait", "at issue", "at random")


@dataclass(frozen=True)
class Schedule:
    """Order of warps and lanes, and the time at which asynchronous copies take effect."""

    order: str = _ORDERS[0]
    landing: str = _LANDINGS[0]
    seed: int = 1

    def __str__(self) -> str:
        return f"{self.order}, copies land {self.landing}"


SCHEDULES = tuple(Schedule(order, landing) for order in _ORDERS for landing in _LANDINGS)


class Emulated(SharedLibrary):
    """Emulator of a card with a chosen schedule. A process has one for each build, because the C library has state."""

    def __init__(self, path: Path, card: Card = A100) -> None:
        super().__init__(path)
        self._library = ctypes.CDLL(str(path))
        self.use(card)
        self.schedule(Schedule())

    def use(self, card: Card) -> None:
        """Apply a card's limits."""
        self._card = card
        self._library.kvk_card(card.shared_bytes)

    def schedule(self, schedule: Schedule) -> None:
        """Choose how the following launches run."""
        self._library.kvk_schedule(
            _ORDERS.index(schedule.order), _LANDINGS.index(schedule.landing), ctypes.c_uint(schedule.seed)
        )

    def launch(
        self, name: str, grid: Sequence[int], threads: int, shared_bytes: int, params: ctypes.Structure, stream: int
    ) -> None:
        self._card.check_registers(name, threads)
        super().launch(name, grid, threads, shared_bytes, params, stream)


def library(**kind: bool) -> Emulated:
    if emulator.compiler() is None:
        pytest.skip("no C++ compiler to build the CUDA emulator with")
    return Emulated(emulator.build(**kind), V100 if kind.get("volta") else A100)


def plant(folder: Path, file: str, right: str, wrong: str, kernels: str) -> None:
    """Copy the emulator's sources to ``folder`` with a bug: ``wrong`` replaces ``right``, which occurs once in a file.

    ``kernels`` is the only file of kernels that stays in the copy. The others take two thirds of a build.
    """
    for part in ("cuda", "emulator"):
        shutil.copytree(cuda_sources.folder() / part, folder / part)
    broken, program = folder / "cuda" / file, folder / "emulator" / "emulator.cpp"
    text = broken.read_text()
    assert text.count(right) == 1, "what the bug replaces has changed: plant it anew"
    broken.write_text(text.replace(right, wrong))
    lines = program.read_text().splitlines(keepends=True)
    program.write_text("".join(line for line in lines if "../cuda/" not in line or kernels in line))


@pytest.fixture
def emulated() -> Emulated:
    return library()


@pytest.fixture
def volta() -> Emulated:
    return library(volta=True)
