"""Reuse in a laboratory: store chunks of one prompt, put them into another, repair, and look at the logits.

The same forward, kernels, chunk format and repair as the worker's, without processes around them. ``verify`` and the
quality benchmark are made of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from kvkernels import pack_chunk, unpack_chunk
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.layout import new_header
from torch import Tensor

from inference_svc.engine import rows
from inference_svc.engine.forward import Decoder
from inference_svc.engine.pool import KEY_BLOCK, BlockTable, KVPool
from inference_svc.engine.repair import Repairing
from inference_svc.model.loader import LoadedModel
from inference_svc.reuse.placement import rotary_of
from inference_svc.reuse.plan import Plan, Positions, Stretch
from inference_svc.reuse.strategies import Repair


@dataclass(frozen=True)
class StoredChunk:
    """A chunk as the cache would hold it."""

    header: ChunkHeader
    payload: memoryview

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.header.token_ids)


@dataclass(frozen=True)
class Repaired:
    """Logits ``[wanted, vocabulary]`` in float32, and the share of the approximate tokens that was recomputed."""

    logits: Tensor
    recomputed_ratio: float


class Laboratory:
    """One model with a pool for one prompt at a time. A loaded model serves one laboratory."""

    def __init__(self, loaded: LoadedModel, longest: int = 4096) -> None:
        self.loaded = loaded
        self.decoder = Decoder(loaded)
        self.rotary = rotary_of(loaded.model)
        self._pool = KVPool(
            loaded.layers, loaded.kv_heads, loaded.head_dim, longest + KEY_BLOCK, loaded.dtype, loaded.device
        )

    def full(self, tokens: Sequence[int], logits_at: Positions, piece: int = 512) -> Tensor:
        """Logits of a prefill without any reuse; ``piece`` rows at a time."""
        with self._pages(len(tokens)) as table:
            return self._prefill(tokens, table, logits_at, piece)

    def store(self, tokens: Sequence[int], ends: Sequence[int], bits: int) -> list[StoredChunk]:
        """Prefills a prompt and stores its chunks, which end at ``ends``."""
        out = []
        with self._pages(len(tokens)) as table:
            self._prefill(tokens, table, np.asarray([len(tokens) - 1]), 512)
            for start, end in pairwise([0, *ends]):
                header = new_header(self.loaded.geometry(min(bits, 16)), list(tokens[start:end]), start)
                payload = memoryview(bytearray(header.payload_bytes))
                slots = torch.from_numpy(table.slots(start, end))
                pack_chunk(self._pool.keys, self._pool.values, slots, header, payload)
                out.append(StoredChunk(header, payload))
        return out

    def reuse(
        self,
        tokens: Sequence[int],
        exact: Sequence[StoredChunk],
        placed: Sequence[tuple[int, StoredChunk]],
        strategy: Repair,
        ratio: float,
        logits_at: Positions,
    ) -> Repaired:
        """Logits with the leading chunks ``exact`` as stored and others ``placed`` at ``(start, chunk)``."""
        with self._pages(len(tokens)) as table:
            at = 0
            for chunk in exact:
                self._place(table, at, chunk)
                at += len(chunk.tokens)
            for start, chunk in placed:
                self._place(table, start, chunk)
            stretches = tuple(Stretch(start, start + len(c.tokens)) for start, c in placed)
            plan = Plan(len(tokens), at, stretches)
            work = Repairing(self.decoder, self._pool, list(tokens), table, plan, strategy, ratio, logits_at=logits_at)
            for _ in work.steps():
                pass
            total = len(plan.approximate_positions)
            return Repaired(torch.cat(work.logits).float(), work.recomputed / total if total else 0.0)

    def keys_values(self, table: BlockTable, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[layers, kv_heads, tokens, head_dim]`` that lie in a table's pages; copies."""
        slots = torch.from_numpy(table.slots(0, tokens)).to(self._pool.keys.device)
        return self._pool.keys.index_select(2, slots), self._pool.values.index_select(2, slots)

    def _place(self, table: BlockTable, start: int, chunk: StoredChunk) -> None:
        delta = start - chunk.header.start_position
        slots = torch.from_numpy(table.slots(start, start + len(chunk.tokens)))
        rotation = self.rotary.by(delta) if delta else None
        unpack_chunk(self._pool.keys, self._pool.values, slots, chunk.header, chunk.payload, rotation)

    def _prefill(self, tokens: Sequence[int], table: BlockTable, logits_at: Positions, piece: int) -> Tensor:
        out = []
        for start in range(0, len(tokens), piece):
            span = rows.Span(list(tokens[start : start + piece]), start, table, False)
            batch = rows.build([span], self._pool, self.loaded.device)
            wanted = logits_at[(logits_at >= start) & (logits_at < start + piece)] - start
            padded = np.concatenate((wanted, np.zeros(-len(wanted) % rows.ROW_MULTIPLE, np.int64)))
            where = torch.from_numpy(padded).to(self.loaded.device)
            logits = self.decoder(replace(batch, logit_rows=where, wanted=len(wanted)))
            if len(wanted):
                out.append(logits.float())
        return torch.cat(out)

    def _pages(self, tokens: int) -> _Pages:
        return _Pages(self._pool, tokens)


class _Pages:
    """Pages for one prompt, given back at the end."""

    def __init__(self, pool: KVPool, tokens: int) -> None:
        self._pool = pool
        table = pool.allocate(tokens)
        if table is None:
            raise ValueError(f"{tokens} tokens are more than the laboratory's pool holds")
        self._table = table

    def __enter__(self) -> BlockTable:
        return self._table

    def __exit__(self, *_: object) -> None:
        self._pool.free(self._table)
