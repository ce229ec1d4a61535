"""Selective recompute: prefill of a prompt with relocated chunks.

The stored keys and values of the chunks are in the pool already. If the selector needs measurements, the lowest layers
are first computed for all approximate tokens. The results of these layers are exact, because the computation starts
from the embeddings. Then the selected and the uncached tokens are computed in the other layers. Each of these tokens
attends to all earlier keys, recomputed or stored. The work is split into pieces, so that other sequences can run
between the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan
from inference_svc.context_reuse.selectors import SelectionSignals, TokenSelector
from inference_svc.context_reuse.selectors.selector import question_rows
from inference_svc.kv_pool.block_table import BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.lora.lora_adapter import LoraAdapter
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.decoder import Decoder
from inference_svc.model_runner.layerwise_load import LayerReadyEvent
from inference_svc.models.linear.plain_linear import ROW_MULTIPLE


@dataclass
class AttentionMass:
    """Attention of a batch's rows to each key, ``mass [keys]``; see ``SelectionSignals.attention``."""

    mass: Tensor

    def see(self, strongest: Tensor) -> None:
        """Add ``strongest [heads, keys]``: the maximum over all rows of each key's probability."""
        # Squared, so that one head with strong attention outweighs many heads with diffuse attention.
        mass = strongest[:, : len(self.mass)].square().sum(0)
        self.mass[: len(mass)] += mass


class KVDeviation:
    """Deviation of recomputed keys and values from the stored ones; see ``SelectionSignals.deviation``."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.float32], NDArray[np.float32]]] = []

    def add(self, before: list[Tensor], after: list[Tensor]) -> None:
        """Add the keys and values of rows ``before`` and ``after`` recomputation.

        Each list has a tensor ``[kv_heads, rows, head_dim]`` for the keys and for the values of each layer.
        """
        moved = torch.stack([(b.float() - a.float()).square().sum((0, 2)) for a, b in zip(before, after, strict=True)])
        size = torch.stack([b.float().square().sum((0, 2)) for b in after])
        self._parts.append((moved.cpu().numpy(), size.cpu().numpy()))

    def relative(self) -> NDArray[np.float32]:
        """Return the deviations ``[rows]``, in the order in which the rows were added."""
        moved, size = (np.concatenate(p, axis=1) for p in zip(*self._parts, strict=True))
        found: NDArray[np.float32] = np.sqrt((moved / np.maximum(size.mean(1, keepdims=True), 1e-12)).sum(0))
        return found


class SelectiveRecompute:
    """Selective recompute of one prompt.

    ``steps`` yields after each piece. After the last piece, ``logits`` are those of the rows at ``logits_at``,
    ``chosen`` are the positions of the recomputed approximate tokens, and ``row_layers`` is the work in rows times
    layers.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        tokens: list[int],
        table: BlockTable,
        plan: ReusePlan,
        strategy: TokenSelector,
        ratio: float,
        *,
        piece_rows: Callable[[], int] = lambda: 512,
        logits_at: Positions | None = None,
        gate: LayerReadyEvent | None = None,
        adapter: LoraAdapter | None = None,
    ) -> None:
        self._decoder, self._pool, self._table = decoder, pool, table
        self._tokens = np.asarray(tokens)
        self._plan, self._strategy, self._ratio = plan, strategy, ratio
        self._piece_rows, self._gate, self._adapter = piece_rows, gate, adapter
        self._logits_at = np.asarray([plan.tokens - 1]) if logits_at is None else logits_at
        self._device = pool.keys.device
        self.chosen: Positions = np.empty(0, np.int64)
        self.row_layers = 0
        self.logits: list[Tensor] = []

    def steps(self) -> Iterator[int]:
        """Compute piece by piece. Yield each piece's number of rows, times the share of layers that it computed."""
        depth, fresh = min(self._strategy.depth, self._decoder.layers - 1), self._plan.uncached_positions
        if not depth:
            chosen = self._choose(SelectionSignals())
            yield from self._finish(np.union1d(chosen, fresh), None, 0)
            return
        positions = np.union1d(self._plan.approximate_positions, fresh)
        changed = KVDeviation()
        parts = []
        for piece in _pieces(positions, self._piece_rows):
            parts.append(self._measure(piece, depth, changed if self._strategy.needs_deviation else None))
            yield len(piece) * (depth + 1) // self._decoder.layers
        hidden = torch.cat(parts)
        is_approximate = np.isin(positions, self._plan.approximate_positions)
        deviation = changed.relative()[is_approximate] if self._strategy.needs_deviation else None
        attention = self._look() if self._strategy.attention_depth else None
        chosen = self._choose(SelectionSignals(deviation, attention))
        go_on = np.union1d(chosen, fresh)
        yield from self._finish(go_on, hidden[np.searchsorted(positions, go_on)], depth)

    def _choose(self, signals: SelectionSignals) -> Positions:
        self.chosen = self._strategy.select(self._plan, self._ratio, signals)
        return self.chosen

    def _batch(self, positions: Positions, logits: bool = False) -> forward_batch.ForwardBatch:
        tokens = self._tokens[positions].tolist()
        span = forward_batch.SequenceSlice(tokens, 0, self._table, False, positions, self._gate, adapter=self._adapter)
        batch = forward_batch.build_batch([span], self._pool, self._device)
        wanted = np.flatnonzero(np.isin(positions, self._logits_at)) if logits else np.empty(0, np.int64)
        if len(wanted):
            padded = np.concatenate((wanted, np.zeros(-len(wanted) % ROW_MULTIPLE, np.int64)))
            batch = replace(batch, logit_rows=torch.from_numpy(padded).to(self._device), wanted=len(wanted))
        return batch

    def _measure(self, positions: Positions, depth: int, changed: KVDeviation | None) -> Tensor:
        """Compute the layers below ``depth``, and keys and values of layer ``depth``.

        Returns the hidden states ``[rows, width]``, and adds the rows to ``changed``.
        """
        batch = self._batch(positions)
        batch.pass_layer(depth)
        self.row_layers += batch.real * depth
        slots, layers = batch.slots[: batch.real], range(1, depth + 1)
        before = self._read(slots, layers) if changed is not None else []
        hidden = self._decoder.advance(self._decoder.embed(batch), batch, 0, depth)
        self._decoder.project(hidden.clone(), batch, depth)
        if changed is not None:
            changed.add(before, self._read(slots, layers))
        return hidden[: batch.real]

    def _read(self, slots: Tensor, layers: range) -> list[Tensor]:
        """Copy keys and values of ``layers`` at ``slots``, each ``[kv_heads, slots, head_dim]``."""
        return [t[i].index_select(1, slots) for i in layers for t in (self._pool.keys, self._pool.values)]

    def _look(self) -> NDArray[np.float32]:
        """Compute the question over the stored keys. Return its attention to each approximate token."""
        uncached = self._plan.uncached_positions
        question = uncached[-question_rows(self._strategy, len(uncached)) :]
        self._clear(uncached[: -len(question)])
        observer = AttentionMass(torch.zeros(self._plan.tokens, device=self._device))
        batch = replace(self._batch(question), observer=observer)
        layers = max(1, int(self._decoder.layers * self._strategy.attention_depth))
        if layers == self._decoder.layers:
            self._decoder.resume(self._decoder.embed(batch), batch, 0)
        else:
            self._decoder.advance(self._decoder.embed(batch), batch, 0, layers)
        self.row_layers += batch.real * layers
        return observer.mass.cpu().numpy()[self._plan.approximate_positions]

    def _clear(self, positions: Positions) -> None:
        """Clear keys and values that are not computed yet: another sequence has left its own in these slots."""
        if len(positions):
            batch = self._batch(positions)
            for tensor in (self._pool.keys, self._pool.values):
                tensor[self._strategy.depth + 1 :].index_fill_(2, batch.slots[: batch.real], 0.0)

    def _finish(self, positions: Positions, hidden: Tensor | None, depth: int) -> Iterator[int]:
        at = 0
        for piece in _pieces(positions, self._piece_rows):
            batch = self._batch(piece, logits=True)
            if hidden is None:
                states = self._decoder.embed(batch)
            else:
                states = _padded(hidden[at : at + len(piece)], len(batch.tokens))
            logits = self._decoder.resume(states, batch, depth)
            self.row_layers += len(piece) * (self._decoder.layers - depth)
            at += len(piece)
            if batch.wanted:
                self.logits.append(logits)
            yield len(piece)


def _padded(states: Tensor, rows_: int) -> Tensor:
    out = states.new_zeros(rows_, states.shape[1])
    out[: len(states)] = states
    return out


def _pieces(positions: Positions, most: Callable[[], int]) -> Iterator[Positions]:
    """Split positions into at least one piece, each of at most ``most()`` positions.

    The pieces have nearly equal sizes, because a small last piece would cost more than its share. ``most`` is called
    before each piece.
    """
    first = True
    while first or len(positions):
        take = -(-len(positions) // max(1, -(-len(positions) // most())))
        yield positions[:take]
        positions, first = positions[take:], False
