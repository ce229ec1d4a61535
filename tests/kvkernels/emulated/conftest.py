"""CUDA emulator fixtures: the CUDA sources compiled for the CPU."""

import ctypes
from pathlib import Path

import pytest
from kvkernels.cuda import emulator
from kvkernels.cuda.cuda_library import SharedLibrary


class Emulated(SharedLibrary):
    """Emulator with a choice of which warp runs first."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._schedule = ctypes.CDLL(str(path)).kvk_schedule

    def last_warp_first(self, last_first: bool) -> None:
        self._schedule(int(last_first))


def library(**kind: bool) -> Emulated:
    if emulator.compiler() is None:
        pytest.skip("no C++ compiler to build the CUDA emulator with")
    return Emulated(emulator.build(**kind))


@pytest.fixture(scope="session")
def emulated() -> Emulated:
    return library()


@pytest.fixture(scope="session")
def volta() -> Emulated:
    return library(volta=True)
