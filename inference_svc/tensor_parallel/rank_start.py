"""Rank start: the ranks of a worker meet, and agree on the identity of their numerics."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import torch
from kvsidecar.errors import ConfigurationError

from inference_svc.models.device_choice import pick_device
from inference_svc.models.loader import LoadedModel
from inference_svc.models.model_check import cuda_devices
from inference_svc.models.tensor_parallel.rank_group import RankGroup
from inference_svc.server.worker_config import WorkerConfig
from inference_svc.tensor_parallel.rank_messages import Joined, Open, Ready
from inference_svc.tensor_parallel.rank_processes import RankProcesses


def new_group(config: WorkerConfig, rank: int, store: Path) -> RankGroup:
    """Join the process group of all ranks at ``store``. On GPUs, rank N uses GPU N. Raises Unavailable."""
    device = pick_device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
    return RankGroup(rank, config.tensor_parallel_size, device, store, config.rank_timeout_seconds)


def join_ranks(config: WorkerConfig, ranks: RankProcesses) -> RankGroup:
    """Wait for the other ranks' processes, and join them. Raises ConfigurationError, Unavailable."""
    size = config.tensor_parallel_size
    if pick_device(config.device).type == "cuda" and (found := cuda_devices()) < size:
        raise ConfigurationError(
            f"tensor_parallel_size is {size}, and this worker sees {found} GPUs; allowed are 1 to {found}"
        )
    ranks.expect(Joined)
    return new_group(config, 0, ranks.store)


def open_ranks(loaded: LoadedModel, ranks: RankProcesses) -> LoadedModel:
    """Wait until the other ranks have loaded their parts of the model.

    Then return the model with one numerics id, a hash over the numerics ids of all ranks.

    A rank's keys depend on sums over all ranks, so the identity covers the kernels of all ranks. Raises Unavailable.
    """
    ids = [loaded.numerics.id, *(ready.numerics for ready in ranks.expect(Ready))]
    common = hashlib.sha256(b"kvsidecar/ranks/1\0" + "\0".join(ids).encode()).hexdigest()[: len(ids[0])]
    ranks.send(Open(common))
    return replace(loaded, numerics=replace(loaded.numerics, id=common))
