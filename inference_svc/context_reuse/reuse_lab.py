"""Reuse lab: approximate reuse in one process, with logits for comparison.

It stores, relocates and recomputes chunks with the worker's decoder, kernels, chunk format and selective recompute.
``verifier`` and the quality benchmarks use it.
"""

from __future__ import annotations

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
from inference_svc.context_reuse.rope_shift import rope_shift_of
from inference_svc.context_reuse.selective_recompute import SelectiveRecompute
from inference_svc.context_reuse.selectors import TokenSelector
from inference_svc.kv_pool.block_table import KEY_BLOCK, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner import forward_batch
from inference_svc.model_runner.decoder import Decoder
from inference_svc.models.linear.plain_linear import ROW_MULTIPLE
from inference_svc.models.loader import LoadedModel

# Storage width in bits at which reuse must fail. A benchmark that misses the failure has no statistical power.
_COARSE_BITS = 2


@dataclass(frozen=True)
class StoredChunk:
    """A chunk as the cache stores it."""

    header: ChunkHeader
    payload: memoryview

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.header.token_ids)


@dataclass(frozen=True)
class LabResult:
    """Logits of a prompt and of its answer.

    ``logits [wanted, vocabulary]`` are float32. ``answer_logits [answer, vocabulary]`` predict each token of the
    answer, which is greedy or given. ``recomputed_ratio`` is the share of approximate tokens that was recomputed.
    ``cost``: computed rows times layers, as a share of a prefill of all tokens that are not exact.
    """

    logits: Tensor
    seconds: float
    greedy_tokens: list[int]
    answer_logits: Tensor
    recomputed_ratio: float = 0.0
    cost: float = 1.0


@dataclass(frozen=True)
class LabDocuments:
    """A prompt's head and documents, which can be stored in another order than they are used in."""

    lab: ReuseLab
    head: list[int]
    parts: tuple[list[int], ...]

    @property
    def tokens(self) -> list[int]:
        """Head and documents in the original order."""
        return self.head + [t for part in self.parts for t in part]

    def stored(self, bits: int) -> list[StoredChunk]:
        """Store head and documents in the original order, one chunk each."""
        return self.stored_at((bits,))[0]

    def stored_at(self, widths: Sequence[int]) -> list[list[StoredChunk]]:
        """Do the same as ``stored`` for several widths."""
        return self.lab.store_at(self.tokens, self._ends(range(len(self.parts))), widths)

    def stored_in_order(
        self, order: Sequence[int], bits: int
    ) -> tuple[list[StoredChunk], list[tuple[int, StoredChunk]]]:
        """Store head and documents in another order.

        Returns the head's chunk, and each document's chunk with its start position in the original order: the arguments
        ``exact`` and ``placed`` of ``ReuseLab.reuse``.
        """
        elsewhere = self.head + [t for i in order for t in self.parts[i]]
        head, *chunks = self.lab.store(elsewhere, self._ends(order), bits)
        by_document, starts = dict(zip(order, chunks, strict=True)), self._ends(range(len(self.parts)))
        return [head], [(starts[i], by_document[i]) for i in range(len(self.parts))]

    def prefill_once(self, bits: int, longest: int) -> PrefilledText:
        """Context that prefills the documents once, for several continuations of up to ``longest`` tokens."""
        return PrefilledText(self.lab, self.tokens, self._ends(range(len(self.parts))), bits, longest)

    def _ends(self, order: Sequence[int]) -> list[int]:
        return list(accumulate([len(self.head), *(len(self.parts[i]) for i in order)]))


class ReuseLab:
    """One model with a pool for one prompt at a time.

    A loaded model can have only one Decoder: pass it if it exists. A prefill computes at most ``piece_rows`` rows at
    once. Raises ModelUnsupported if the model's keys cannot be shifted.
    """

    def __init__(
        self, loaded: LoadedModel, longest: int = 4096, decoder: Decoder | None = None, piece_rows: int = 512
    ) -> None:
        self.loaded, self._piece_rows = loaded, piece_rows
        self.key_rotation = rope_shift_of(loaded.model)
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
        piece: int | None = None,
        go_on: int = 0,
        answer: Sequence[int] = (),
    ) -> LabResult:
        """Prefill without reuse, ``piece`` rows at a time. The answer is ``go_on`` greedy tokens or ``answer``."""
        with self.pages(len(tokens) + max(go_on, len(answer))) as table:
            began = time.perf_counter()
            logits = self.prefill(tokens, table, logits_at, piece)
            seconds = time.perf_counter() - began
            return LabResult(logits, seconds, *self.continue_answer(table, len(tokens), logits, go_on, answer))

    def store(self, tokens: Sequence[int], ends: Sequence[int], bits: int) -> list[StoredChunk]:
        """Prefill a prompt and store its chunks, which end at ``ends``.

        The chunk format has no 2-bit width: for ``bits`` 2, values are rounded to 2 bits and stored at 4 bits.
        """
        return self.store_at(tokens, ends, (bits,))[0]

    def store_at(self, tokens: Sequence[int], ends: Sequence[int], widths: Sequence[int]) -> list[list[StoredChunk]]:
        """Do the same as ``store`` for several widths after one prefill. A width of 2 bits must be the last."""
        with self.pages(len(tokens)) as table:
            self.prefill(tokens, table, np.asarray([len(tokens) - 1]))
            return [self.chunks(table, tokens, ends, bits) for bits in widths]

    def chunks(self, table: BlockTable, tokens: Sequence[int], ends: Sequence[int], bits: int) -> list[StoredChunk]:
        """Pack prefilled tokens as chunks that end at ``ends``. With ``bits`` 2, round the pool's values in place."""
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
        """Run a prompt with leading chunks ``exact`` and relocated chunks ``placed`` as ``(start, chunk)``.

        ``strategy`` selects the tokens to recompute. The answer is ``go_on`` greedy tokens or the given ``answer``.
        """
        with self.pages(len(tokens) + max(go_on, len(answer))) as table:
            began = time.perf_counter()
            plan = self.place_chunks(table, tokens, exact, placed)
            work = SelectiveRecompute(
                self.decoder,
                self.pool,
                list(tokens),
                table,
                plan,
                strategy,
                ratio,
                piece_rows=lambda: self._piece_rows,
                logits_at=logits_at,
            )
            for _ in work.steps():
                pass
            logits, total = torch.cat(work.logits), len(plan.approximate_positions)
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
        """Unpack stored chunks at their positions in a prompt, with RoPE shift."""
        at = 0
        for chunk in exact:
            self._place(table, at, chunk)
            at += len(chunk.tokens)
        for start, chunk in placed:
            self._place(table, start, chunk)
        return ReusePlan(len(tokens), at, tuple(RelocatedSpan(start, start + len(c.tokens)) for start, c in placed))

    def documents(self, head: Sequence[int], parts: Sequence[Sequence[int]]) -> LabDocuments:
        """Build LabDocuments of this lab from token ids."""
        return LabDocuments(self, list(head), tuple(list(part) for part in parts))

    def continue_answer(
        self, table: BlockTable, at: int, logits: Tensor, go_on: int, answer: Sequence[int]
    ) -> tuple[list[int], Tensor]:
        """Return the answer's tokens after the prompt, and the logits that predict each of them."""
        if answer:
            return list(answer), self.teacher_forced_logits(table, at, logits, answer)
        return self._generate_greedy(table, at, logits, go_on)

    def _generate_greedy(self, table: BlockTable, at: int, logits: Tensor, count: int) -> tuple[list[int], Tensor]:
        """Generate greedy tokens after the last logits; return them and the logits that predict each of them."""
        out: list[int] = []
        found = [logits[-1:]]
        for i in range(count):
            out.append(int(found[-1].argmax()))
            if i + 1 < count:
                span = forward_batch.SequenceSlice(out[-1:], at + i, table, True)
                found.append(self.decoder(forward_batch.build_batch([span], self.pool, self.loaded.device)))
        return out, torch.cat(found[:count]) if count else logits[:0]

    def teacher_forced_logits(self, table: BlockTable, at: int, logits: Tensor, answer: Sequence[int]) -> Tensor:
        """Compute the logits ``[answer, vocabulary]`` that predict each token of a given answer."""
        if len(answer) == 1:
            return logits[-1:]
        span = forward_batch.SequenceSlice(list(answer[:-1]), at, table, False)
        return torch.cat((logits[-1:], self.logits(span, np.arange(len(answer) - 1))))

    def logits(self, span: forward_batch.SequenceSlice, wanted: Positions) -> Tensor:
        """Compute a slice and return the logits of its rows ``wanted``."""
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

    def prefill(
        self, tokens: Sequence[int], table: BlockTable, logits_at: Positions, piece: int | None = None
    ) -> Tensor:
        """Prefill a prompt into its blocks; return float32 logits at positions ``logits_at``."""
        out, piece = [], piece or self._piece_rows
        for start in range(0, len(tokens), piece):
            span = forward_batch.SequenceSlice(list(tokens[start : start + piece]), start, table, False)
            wanted = logits_at[(logits_at >= start) & (logits_at < start + piece)] - start
            logits = self.logits(span, wanted)
            if len(wanted):
                out.append(logits)
        return torch.cat(out)

    def pages(self, tokens: int) -> _Pages:
        """Context with blocks for one prompt. Raises ValueError if the pool is too small."""
        return _Pages(self.pool, tokens)


class PrefilledText:
    """A prefilled text: its chunks at a storage width, and continuations after it.

    If a row's bits do not depend on its batch (``models.mkl_determinism``), results equal those of a new prefill.
    """

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
        """Prefill a continuation; return logits of its last ``judged`` tokens and ``go_on`` greedy tokens."""
        began, start = time.perf_counter(), len(self._tokens)
        span = forward_batch.SequenceSlice(list(tail), start, self._table, False)
        logits = self._lab.logits(span, np.arange(len(tail) - judged, len(tail)))
        seconds = time.perf_counter() - began
        return LabResult(logits, seconds, *self._lab.continue_answer(self._table, start + len(tail), logits, go_on, ()))


class _Pages:
    """Context that allocates blocks for one prompt and frees them."""

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
