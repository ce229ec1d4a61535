"""Engines with small models that have sliding windows, and with small pools."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from kvsidecar.kv_transfer.daemon_connection import DaemonConnection
from kvsidecar.net.channel import ServiceAddress

from benchmarks.node import Node
from inference_svc.context_reuse.chunking import FixedChunker
from inference_svc.context_reuse.reuse_policy import ReusePolicy
from inference_svc.engine.engine import Engine
from inference_svc.engine.engine_stats import EngineLimits
from inference_svc.kv_client.daemon_connector import DaemonConnector
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.disk_overflow import DiskOverflow
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.kv_pool.prefix_cache import StoredPrefix
from inference_svc.sequence.generation_request import CacheParams
from inference_svc.sequence.kv_connector import NullKVConnector, SaveCallback
from inference_svc.sequence.sequence import Sequence, SequenceOutput
from tests.inference_svc.models.test_architectures import build
from tests.inference_svc.server.test_load import Request, idle

WINDOW, PIECE, CHUNK, CONTEXT = 96, 128, 64, 4096
ALL, SOME = "MistralForCausalLM", "Gemma3ForCausalLM"  # have windows in all layers, in some
LIMITS = {"max_num_batched_tokens": PIECE}


def prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(500) for _ in range(tokens)]


@dataclass
class Windowed:
    """An engine. ``pages`` records the number of used blocks of the pool at each output."""

    engine: Engine
    cache: DaemonConnector | None

    def __post_init__(self) -> None:
        self.pages: list[int] = []
        self.stored = 0

    def request(self, ids: list[int], length: int = 20, **use: Any) -> Request:
        request = Request(ids, length)
        request.sequence.request = replace(request.sequence.request, cache=CacheParams(**use))
        sink = request.sequence.sink

        def note(output: SequenceOutput) -> None:
            self.pages.append(self.engine.pool.pages - self.engine.pool.free_pages)
            self.stored = output.stored_tokens or self.stored
            sink(output)

        request.sequence.sink = note
        self.engine.submit(request.sequence)
        return request

    def request_together(self, prompts: list[list[int]], length: int) -> list[Request]:
        """Submit between two steps, so that no request has ended before the last one runs."""
        return self.engine.between_steps(lambda: [self.request(ids, length) for ids in prompts])

    def answer(self, ids: list[int], length: int = 20, **use: Any) -> tuple[list[int], int]:
        """Return an answer's tokens, and the number of cached tokens in its prompt."""
        request = self.request(ids, length, **use)
        tokens = request.tokens()
        idle(self.engine)
        self.engine.check_integrity()
        return tokens, request.sequence.usage.num_cached

    def close(self) -> None:
        self.engine.stop()
        if self.cache is not None:
            self.cache.close()


def windowed(
    name: str = ALL,
    tokens: int = 8192,
    node: Node | None = None,
    keep_all: bool = False,
    slow: SlowCache | None = None,
    dtype: torch.dtype = torch.float32,
    overflow: tuple[Path, int] | None = None,
    **limits: int,
) -> Windowed:
    """Create an engine with a model that has sliding windows.

    With ``keep_all``, the pool ignores windows. ``overflow`` is the path of a disk overflow and its size in tokens.
    """
    loaded, _, _ = build(name, dtype, served=CONTEXT, sliding_window=WINDOW, max_position_embeddings=CONTEXT)
    loaded = replace(loaded, weights=bytes(32))
    windows = () if keep_all else loaded.windows
    shape = loaded.layers, loaded.kv_heads, loaded.head_dim
    beyond = DiskOverflow(overflow[0], *shape, tokens, overflow[1], dtype) if overflow else None
    pool = KVPool(*shape, tokens, loaded.dtype, loaded.device, windows, beyond)
    cache = None
    if node is not None:
        link = DaemonConnection(ServiceAddress(node.cache_socket), name, loaded.descriptor(16))
        cache = DaemonConnector(
            {b"": link}, loaded.geometry(16), ReusePolicy(FixedChunker(CHUNK), None, None, None), 0.1, 5.0
        )
        assert link.wait(60)
    return Windowed(Engine(loaded, pool, cache or slow or NullKVConnector(), EngineLimits(**LIMITS | limits)), cache)


class SlowCache(NullKVConnector):
    """Connector that stores parts of sequences only after ``go_on``. All chunks end at multiples of ``CHUNK``."""

    def __init__(self) -> None:
        self._parts: list[tuple[Sequence, int, SaveCallback]] = []
        self._told, self._asked = threading.Event(), threading.Event()

    def save_part(self, sequence: Sequence, pool: KVPool, table: BlockTable, tokens: int, done: SaveCallback) -> bool:
        self._asked.set()
        if self._told.is_set():
            self._store(sequence, tokens, done)
        else:
            self._parts.append((sequence, tokens, done))
        return True

    def wait(self) -> None:
        """Wait until the engine has asked to store a part."""
        assert self._asked.wait(30)

    def go_on(self) -> None:
        self._told.set()
        while self._parts:
            self._store(*self._parts.pop(0))

    @staticmethod
    def _store(sequence: Sequence, tokens: int, done: SaveCallback) -> None:
        end = tokens // CHUNK * CHUNK
        threading.Thread(target=done, args=(sequence, StoredPrefix(end, b"hash", end))).start()
