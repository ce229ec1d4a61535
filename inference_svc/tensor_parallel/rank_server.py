"""Rank server: the process of a rank other than 0. It executes the commands of rank 0 first in, first out."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import structlog
import torch
from kvsidecar.cli.service_settings import configure_logging
from kvsidecar.process.fd_limit import raise_descriptor_limit
from kvsidecar.process.malloc_tuning import keep_freed_memory, trim_freed_memory

from inference_svc.kv_client.client_context import ClientContext
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.loader import LoadedModel, quiet_transformers
from inference_svc.sequence.detokenizer import IncrementalDetokenizer
from inference_svc.server.daemon_address import daemon_address
from inference_svc.server.pool_builder import build_pool
from inference_svc.server.worker_config import WorkerConfig
from inference_svc.server.worker_model import (
    daemon_connection,
    load_model,
    prepare_model,
    probe_numerics,
    reuse_policy,
)
from inference_svc.tensor_parallel.rank_cache import CacheOrder, RankCache
from inference_svc.tensor_parallel.rank_channel import RankChannel
from inference_svc.tensor_parallel.rank_messages import (
    Checked,
    CheckFinite,
    Compute,
    CopySlots,
    Joined,
    Open,
    Order,
    Ready,
    Start,
    Stop,
    ZeroSlots,
)
from inference_svc.tensor_parallel.rank_processes import num_threads
from inference_svc.tensor_parallel.rank_start import new_group

log = structlog.get_logger("worker")
EXIT_LEFT, EXIT_FAILED = 71, 72
"""Exit codes: 71 if rank 0 ended, 72 if an order or the start failed."""


class RankServer:
    """Executes steps on the caller's thread, and cache orders on another thread."""

    def __init__(self, decoder: Decoder, pool: KVPool, cache: RankCache | None, channel: RankChannel) -> None:
        self._decoder, self._pool, self._cache, self._channel = decoder, pool, cache, channel

    def execute(self, order: Order) -> bool:
        """Executes one order; False after the last one. After an error, the ranks are at different places of a step."""
        pool = self._pool
        match order:
            case Compute(slices):
                self._decoder.compute([piece.slice() for piece in slices], pool)
            case CopySlots(source, target, count) if count:
                pool.copy_slots(source[0], target[0], count)
            case CopySlots(source, target):
                pool.copy_scattered(np.array(source, np.int64), np.array(target, np.int64))
            case ZeroSlots(slots, count) if count:
                pool.zero_range(slots[0], count)
            case ZeroSlots(slots):
                pool.zero_slots(np.array(slots, np.int64))
            case CheckFinite(slots, number):
                finite = pool.are_finite(np.array(slots, np.int64)).tolist()
                self._channel.send(Checked(number, finite))
            case Stop():
                if self._cache is not None:
                    self._cache.close()
                return False
            case _ if isinstance(order, CacheOrder):
                assert self._cache is not None, "rank 0 sends cache orders only with a daemon"
                self._cache.submit(order)
            case _:
                raise ValueError(f"unexpected order {order.kind}")
        return True


def main(descriptor: int) -> int:
    """Runs a rank until rank 0 stops it or ends. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C and stops the other ranks
    channel = RankChannel(socket.socket(fileno=descriptor))
    start = channel.receive()
    assert isinstance(start, Start)
    config = WorkerConfig.model_validate_json(start.config)
    configure_logging(config.log_level, f"rank {start.rank}")
    inbox: queue.SimpleQueue[Order] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(channel, inbox), name="orders", daemon=True).start()
    raise_descriptor_limit()
    quiet_transformers()
    channel.send(Joined())
    try:
        return _run(config, start, channel, inbox)
    except Exception as error:
        log.exception("this rank has failed, and ends the worker", rank=start.rank, of=start.size, error=str(error))
        return EXIT_FAILED


def _receive(channel: RankChannel, inbox: queue.SimpleQueue[Order]) -> None:
    """Queues orders. Ends this process when rank 0 has ended, even in the middle of a collective."""
    while (order := channel.receive()) is not None:
        assert isinstance(order, Order)
        inbox.put(order)
        if isinstance(order, Stop):
            return
    log.error("rank 0 has ended, so this rank ends")
    os._exit(EXIT_LEFT)


def _run(config: WorkerConfig, start: Start, channel: RankChannel, inbox: queue.SimpleQueue[Order]) -> int:
    torch.set_num_threads(num_threads(config))
    keep_freed_memory()
    loaded = prepare_model(config, load_model(config, 0, new_group(config, start.rank, Path(start.store))))
    pool, decoder = build_pool(config, loaded), Decoder(loaded)
    loaded = probe_numerics(config, loaded, decoder, pool)
    trim_freed_memory()
    channel.send(Ready(loaded.numerics.id))
    opened = inbox.get()
    if isinstance(opened, Stop):
        return 0
    assert isinstance(opened, Open)
    loaded = replace(loaded, numerics=replace(loaded.numerics, id=opened.numerics))
    server = RankServer(decoder, pool, _cache(config, loaded, pool, channel), channel)
    while server.execute(inbox.get()):
        pass
    log.info("stopping")
    return 0


def _cache(config: WorkerConfig, loaded: LoadedModel, pool: KVPool, channel: RankChannel) -> RankCache | None:
    address, shard = daemon_address(config), loaded.shard
    if address is None or shard is None:
        return None
    named = config.model_copy(update={"name": f"{config.name}.{shard.rank}"})
    daemon = daemon_connection(address, named, loaded, b"", "")
    context = ClientContext(
        loaded.geometry(config.storage_bits),
        reuse_policy(config, loaded),
        loaded.projection_share,
        config.cache_timeout_ms / 1000,
    )
    detokenizer = IncrementalDetokenizer(loaded.tokenizer, (), frozenset())
    return RankCache(daemon, context, pool, detokenizer, channel.send)
