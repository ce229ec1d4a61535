"""Reuse in a laboratory: store chunks of one prompt, put them into another, repair, and look at the logits.

The same forward, kernels, chunk format and repair as the worker's, without processes around them. ``verify`` and the
quality benchmark are made of this.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from kvkernels import pack_chunk, unpack_chunk
from kvsidecar.cache.v1.chunk_pb2 import ChunkHeader
from kvsidecar.chunk_layout import new_header
from torch import Tensor

from inference_svc.context_reuse.reuse_plan import Positions, RelocatedSpan, ReusePlan
from inference_svc.context_reuse.rope_shift import key_rotation_of
from inference_svc.context_reuse.selective_recompute import SelectiveRecompute
from inference_svc.context_reuse.selectors import TokenSelector
from inference_svc.kv_pool.block_table import KEY_BLOCK, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.linear.plain_linear import ROW_MULTIPLE
from inference_svc.models.loader import LoadedModel

# Bits that nobody should store: what a benchmark with power must see failing.
_COARSE_BITS = 2


@dataclass(frozen=True)
class StoredChunk:
    """A chunk as the cache would hold it."""

    header: ChunkHeader
    payload: memoryview

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.header.token_ids)


@dataclass(frozen=True)
class LabResult:
    """Logits ``[wanted, vocabulary]`` in float32, the seconds that they took, greedy tokens that follow, the logits
    ``[answer, vocabulary]`` from which each token of an answer is predicted (the greedy one, or one that was given),
    the share of the approximate tokens that was computed again, and ``cost``: rows times layers that were computed, as
    a share of those of all tokens that are not exact."""

    logits: Tensor
    seconds: float
    greedy_tokens: list[int]
    answer_logits: Tensor
    recomputed_ratio: float = 0.0
    cost: float = 1.0


def shuffled_order(count: int, rng: random.Random) -> list[int]:
    """A random order of so many documents that is not theirs. Raises ValueError for fewer than two."""
    if count < 2:
        raise ValueError(f"{count} documents have no other order")
    order = list(range(count))
    while order == sorted(order):
        rng.shuffle(order)
    return order


@dataclass(frozen=True)
class LabDocuments:
    """Documents behind a beginning, read in their order or in another."""

    lab: ReuseLab
    head: list[int]
    parts: tuple[list[int], ...]

    @property
    def tokens(self) -> list[int]:
        """In their order."""
        return self.head + [t for part in self.parts for t in part]

    def stored(self, bits: int) -> list[StoredChunk]:
        """As they stand: the beginning and each document a chunk."""
        return self.stored_at((bits,))[0]

    def stored_at(self, widths: Sequence[int]) -> list[list[StoredChunk]]:
        """The same at several widths."""
        return self.lab.store_at(self.tokens, self._ends(range(len(self.parts))), widths)

    def stored_in_order(
        self, order: Sequence[int], bits: int
    ) -> tuple[list[StoredChunk], list[tuple[int, StoredChunk]]]:
        """As they were when they stood in another order: the beginning, and documents with the places where they stand
        now. They are ``exact`` and ``placed`` of ``Laboratory.reuse``."""
        elsewhere = self.head + [t for i in order for t in self.parts[i]]
        head, *chunks = self.lab.store(elsewhere, self._ends(order), bits)
        by_document, starts = dict(zip(order, chunks, strict=True)), self._ends(range(len(self.parts)))
        return [head], [(starts[i], by_document[i]) for i in range(len(self.parts))]

    def prefill_once(self, bits: int, longest: int) -> PrefilledText:
        """Reads them, in their order, for several texts of up to ``longest`` tokens behind them. For a ``with``."""
        return PrefilledText(self.lab, self.tokens, self._ends(range(len(self.parts))), bits, longest)

    def _ends(self, order: Sequence[int]) -> list[int]:
        return list(accumulate([len(self.head), *(len(self.parts[i]) for i in order)]))


class ReuseLab:
    """One model with a pool for one prompt at a time. A loaded model serves one Decoder: give it, if there is one.

    Raises ModelUnsupported when the model's keys cannot be moved.
    """

    def __init__(self, loaded: LoadedModel, longest: int = 4096, decoder: Decoder | None = None) -> None:
        self.loaded = loaded
        self.key_rotation = key_rotation_of(loaded.model)
        self.decoder = decoder or Decoder(loaded)
        self.pool = KVPool(
            loaded.layers,
            loaded.kv_heads,
            loaded.head_dim,
            longest + KEY_BLOCK,
            loaded.dtype,
            loaded.device,
        )

    def full_prefill(
        self,
        tokens: Sequence[int],
        logits_at: Positions,
        piece: int = 512,
        go_on: int = 0,
        answer: Sequence[int] = (),
    ) -> LabResult:
        """A prefill without any reuse, ``piece`` rows at a time; after it ``go_on`` greedy tokens, or ``answer``."""
        with self.pages(len(tokens) + max(go_on, len(answer))) as table:
            began = time.perf_counter()
            logits = self.prefill(tokens, table, logits_at, piece)
            seconds = time.perf_counter() - began
            return LabResult(logits, seconds, *self.continue_answer(table, len(tokens), logits, go_on, answer))

    def store(self, tokens: Sequence[int], ends: Sequence[int], bits: int) -> list[StoredChunk]:
        """Prefills a prompt and stores its chunks, which end at ``ends``. ``bits`` 2 rounds values to 2 bits and stores
        the result in 8, which the format itself does not offer."""
        return self.store_at(tokens, ends, (bits,))[0]

    def store_at(self, tokens: Sequence[int], ends: Sequence[int], widths: Sequence[int]) -> list[list[StoredChunk]]:
        """The same at several widths, 2 bits last: they are prefilled once."""
        with self.pages(len(tokens)) as table:
            self.prefill(tokens, table, np.asarray([len(tokens) - 1]))
            return [self.chunks(table, tokens, ends, bits) for bits in widths]

    def chunks(self, table: BlockTable, tokens: Sequence[int], ends: Sequence[int], bits: int) -> list[StoredChunk]:
        """What was prefilled into a table's pages, as chunks that end at ``ends``. Rounds it coarsely for 2 bits."""
        out = []
        if bits == _COARSE_BITS:
            self._round_coarsely(table, len(tokens))
        for start, end in pairwise([0, *ends]):
            header = new_header(self.loaded.geometry(max(bits, 4)), list(tokens[start:end]), start)
            payload = memoryview(bytearray(header.payload_bytes))
            slots = torch.from_numpy(table.slots(start, end))
            pack_chunk(self.pool.keys, self.pool.values, slots, header, payload)
            out.append(StoredChunk(header, payload))
        return out

    def reuse(
        self,
        tokens: Sequence[int],
        exact: Sequence[StoredChunk],
        placed: Sequence[tuple[int, StoredChunk]],
        strategy: TokenSelector,
        ratio: float,
        logits_at: Positions,
        go_on: int = 0,
        answer: Sequence[int] = (),
    ) -> LabResult:
        """With the leading chunks ``exact`` as stored and others ``placed`` at ``(start, chunk)``. After it come
        ``go_on`` greedy tokens, or the ``answer`` that is given; the logits of either are the outcome's."""
        with self.pages(len(tokens) + max(go_on, len(answer))) as table:
            began = time.perf_counter()
            plan = self.place_chunks(table, tokens, exact, placed)
            work = SelectiveRecompute(
                self.decoder, self.pool, list(tokens), table, plan, strategy, ratio, logits_at=logits_at
            )
            for _ in work.steps():
                pass
            logits, total = torch.cat(work.logits).float(), len(plan.approximate_positions)
            seconds = time.perf_counter() - began
            following, after = self.continue_answer(table, len(tokens), logits, go_on, answer)
            share = len(work.chosen) / total if total else 0.0
            cost = work.row_layers / (self.decoder.layers * (len(tokens) - plan.exact))
            return LabResult(logits, seconds, following, after, share, cost)

    def place_chunks(
        self,
        table: BlockTable,
        tokens: Sequence[int],
        exact: Sequence[StoredChunk],
        placed: Sequence[tuple[int, StoredChunk]],
    ) -> ReusePlan:
        """Puts stored chunks where they stand in a prompt."""
        at = 0
        for chunk in exact:
            self._place(table, at, chunk)
            at += len(chunk.tokens)
        for start, chunk in placed:
            self._place(table, start, chunk)
        return ReusePlan(len(tokens), at, tuple(RelocatedSpan(start, start + len(c.tokens)) for start, c in placed))

    def documents(self, head: Sequence[int], parts: Sequence[Sequence[int]]) -> LabDocuments:
        """Documents to be stored in one order and used in another."""
        return LabDocuments(self, list(head), tuple(list(part) for part in parts))

    def continue_answer(
        self, table: BlockTable, at: int, logits: Tensor, go_on: int, answer: Sequence[int]
    ) -> tuple[list[int], Tensor]:
        """What follows the prompt, and what predicted each token of it."""
        if answer:
            return list(answer), self.teacher_forced_logits(table, at, logits, answer)
        return self._generate_greedy(table, at, logits, go_on)

    def _generate_greedy(self, table: BlockTable, at: int, logits: Tensor, count: int) -> tuple[list[int], Tensor]:
        """Greedy tokens after the last logits, and what predicted each."""
        out: list[int] = []
        found = [logits[-1:].float()]
        for i in range(count):
            out.append(int(found[-1].argmax()))
            if i + 1 < count:
                span = forward_batch.SequenceSlice(out[-1:], at + i, table, True)
                found.append(self.decoder(forward_batch.build_batch([span], self.pool, self.loaded.device)).float())
        return out, torch.cat(found[:count]) if count else logits[:0]

    def teacher_forced_logits(self, table: BlockTable, at: int, logits: Tensor, answer: Sequence[int]) -> Tensor:
        """What predicts each token of an answer that is given, after the last logits: ``[answer, vocabulary]``."""
        if len(answer) == 1:
            return logits[-1:].float()
        span = forward_batch.SequenceSlice(list(answer[:-1]), at, table, False)
        return torch.cat((logits[-1:].float(), self.logits(span, np.arange(len(answer) - 1)).float()))

    def logits(self, span: forward_batch.SequenceSlice, wanted: Positions) -> Tensor:
        """Computes a span: logits of its rows of these numbers."""
        batch = forward_batch.build_batch([span], self.pool, self.loaded.device)
        padded = np.concatenate((wanted, np.zeros(-len(wanted) % ROW_MULTIPLE, np.int64)))
        where = torch.from_numpy(padded).to(self.loaded.device)
        return self.decoder(replace(batch, logit_rows=where, wanted=len(wanted)))

    def _round_coarsely(self, table: BlockTable, tokens: int) -> None:
        slots = torch.from_numpy(table.slots(0, tokens)).to(self.pool.keys.device)
        for tensor, axis in ((self.pool.keys, 2), (self.pool.values, 3)):
            x = tensor.index_select(2, slots).float()
            low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
            step = ((high - low) / (2**_COARSE_BITS - 1)).clamp_min(1e-12)
            tensor.index_copy_(2, slots, (torch.round((x - low) / step) * step + low).to(tensor.dtype))

    def _place(self, table: BlockTable, start: int, chunk: StoredChunk) -> None:
        delta = start - chunk.header.start_position
        slots = torch.from_numpy(table.slots(start, start + len(chunk.tokens)))
        rotation = self.key_rotation.by(delta) if delta else None
        unpack_chunk(self.pool.keys, self.pool.values, slots, chunk.header, chunk.payload, rotation)

    def prefill(self, tokens: Sequence[int], table: BlockTable, logits_at: Positions, piece: int = 512) -> Tensor:
        """Reads a prompt into its pages; logits at these positions, float32."""
        out = []
        for start in range(0, len(tokens), piece):
            span = forward_batch.SequenceSlice(list(tokens[start : start + piece]), start, table, False)
            wanted = logits_at[(logits_at >= start) & (logits_at < start + piece)] - start
            logits = self.logits(span, wanted)
            if len(wanted):
                out.append(logits.float())
        return torch.cat(out)

    def pages(self, tokens: int) -> _Pages:
        """Pages for one prompt, for a ``with``. Raises ValueError for more than the pool holds."""
        return _Pages(self.pool, tokens)


class PrefilledText:
    """Text that is read once, as chunks at a storage width and as what other text stands behind. A row's bits do not
    depend on what is computed with it where ``numerics`` says so: there it is as if all were read anew."""

    def __init__(self, lab: ReuseLab, tokens: Sequence[int], ends: Sequence[int], bits: int, longest: int) -> None:
        self._lab, self._tokens, self._ends, self._bits = lab, tokens, ends, bits
        self._longest = longest

    def __enter__(self) -> PrefilledText:
        with ExitStack() as stack:
            self._table = stack.enter_context(self._lab.pages(len(self._tokens) + self._longest))
            self._lab.prefill(self._tokens, self._table, np.asarray([len(self._tokens) - 1]))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def stored(self) -> list[StoredChunk]:
        return self._lab.chunks(self._table, self._tokens, self._ends, self._bits)

    def continue_with(self, tail: Sequence[int], judged: int, go_on: int = 0) -> LabResult:
        """A prefill of what stands behind it: logits at the last ``judged`` tokens, and ``go_on`` greedy ones."""
        began, start = time.perf_counter(), len(self._tokens)
        span = forward_batch.SequenceSlice(list(tail), start, self._table, False)
        logits = self._lab.logits(span, np.arange(len(tail) - judged, len(tail))).float()
        seconds = time.perf_counter() - began
        return LabResult(logits, seconds, *self._lab.continue_answer(self._table, start + len(tail), logits, go_on, ()))


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
