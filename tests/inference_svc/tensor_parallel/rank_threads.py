"""Tensor-parallel ranks as threads of one process, each with its own gloo group, for tests of models."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from inference_svc.models.tensor_parallel.rank_group import RankGroup

T = TypeVar("T")


def on_ranks(size: int, folder: Path, work: Callable[[RankGroup], T]) -> list[T]:
    """Run ``work`` on every rank; return the results in the order of the ranks."""

    def run(rank: int) -> T:
        torch.set_num_threads(1)
        return work(RankGroup(rank, size, torch.device("cpu"), folder / "store", 20.0))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))
