"""Pages of branches: of guesses for a sequence that others stand beside, at the same positions.

Attention sees what stands before a row in its table, so a branch gets a table of its own: the sequence's pages, and
from the one on in which it begins others, for this pass alone. What that page holds before the branch is copied there,
or, of rows of the same pass, written there as well. So a row's keys lie in the same order, in the same blocks, as they
would without any other branch, and it has the same bits. Nothing is copied back but what becomes part of the answer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from kvsidecar.errors import GenerationFailed
from torch import Tensor

from inference_svc.engine.sequence import Sequence
from inference_svc.kv_pool.block_table import BLOCK_TOKENS, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.forward_batch import Branch, SequenceSlice
from inference_svc.spec_decode.proposer import Draft
from inference_svc.spec_decode.speculation_mode import SpeculationMode


class BranchTables:
    """Only the engine's thread uses it. Owns the branches' pages until ``release``."""

    def __init__(self, pool: KVPool, grow: Callable[[BlockTable, int], bool]) -> None:
        """``grow`` makes room in a table for so many tokens in all, or says that there is none."""
        self._pool, self._grow = pool, grow
        self._held: dict[Sequence, list[BlockTable]] = {}

    @property
    def tables(self) -> list[BlockTable]:
        """What is held of the pool."""
        return [table for tables in self._held.values() for table in tables]

    def branches(self, sequence: Sequence, guesses: Draft) -> tuple[Branch, ...]:
        """Those of ``guesses`` that do not go on where their first child does. The sequence's table has room for the
        deepest. Where no page is left there are fewer of them, or none."""
        assert sequence.table is not None
        root = len(sequence.tokens) - 1
        first, *others = guesses.paths()
        # Of each row that is drawn from: its node, and where its keys and values lie.
        tables = [sequence.table] * (1 + len(first))
        rows = {-1: 0} | {node: row for row, node in enumerate(first, 1)}
        found = list[Branch]()
        for path in others:
            behind = rows.get(guesses.parents[path[0]])
            if behind is None:
                continue  # what it goes on from found no room
            ancestors = [rows[node] for node in guesses.ancestors(path[0])]
            start = root + len(ancestors)
            table = self._fork(sequence, tables[behind], start, start + len(path))
            if table is None:
                continue
            page = start // BLOCK_TOKENS * BLOCK_TOKENS
            places = [(row, position) for position, row in enumerate(ancestors, root) if position >= page]
            copied = tuple((row, int(table.slots(position, position + 1)[0])) for row, position in places)
            tokens, at = [guesses.tokens[node] for node in path], len(tables)
            found.append(Branch(tokens, start, behind, at, table, copied, sequence.adapter))
            rows |= {node: row for row, node in enumerate(path, at)}
            tables += [table] * len(path)
        return tuple(found)

    def adopt(self, sequence: Sequence, branch: Branch, row: int) -> None:
        """Copies keys and values of a branch's row into the sequence's own pages, for it is part of the answer."""
        assert sequence.table is not None
        position = branch.start + row - branch.first
        source, target = (int(t.slots(position, position + 1)[0]) for t in (branch.table, sequence.table))
        self._pool.copy_slots(source, target, 1)

    def erase(self, sequence: Sequence) -> None:
        """Clears a failed sequence's: what is not finite must not reach whoever gets the pages next."""
        for table in self._held.get(sequence, ()):
            self._pool.erase(table)

    def check(self, spans: list[tuple[Sequence, SequenceSlice]], logits: Tensor) -> None:
        """Raises GenerationFailed where guesses made rows of ``logits [rows, vocabulary]``, those that spans draw from,
        NaN or infinite: a right row that attends beside theirs, too. Their keys and values are cleared then, and
        nothing more is guessed for these sequences."""
        if not any(span.guessed for _, span in spans):
            return
        # A row that is not finite somewhere in the model is not so in any logit.
        sound, at, spoiled = torch.isfinite(logits[:, 0]).tolist(), 0, list[str]()
        for sequence, span in spans:
            rows = 1 + span.guessed if span.wants_logits else 0
            if span.guessed and not all(sound[at : at + rows]):
                self._pool.clear(span.table, span.end - span.drafted, span.end)
                self.erase(sequence)
                sequence.speculation = SpeculationMode.OFF
                spoiled.append(sequence.id)
            at += rows
        if spoiled:
            raise GenerationFailed(f"the model computed NaN or infinity of what was guessed for {', '.join(spoiled)}")

    def release(self) -> None:
        """Frees all pages. The branches are of no use any more."""
        for table in self.tables:
            self._pool.free(table)
        self._held.clear()

    def _fork(self, sequence: Sequence, table: BlockTable, start: int, end: int) -> BlockTable | None:
        """A table that goes another way from ``start`` on, with room up to ``end``, and what is computed before."""
        page = start // BLOCK_TOKENS * BLOCK_TOKENS
        own = BlockTable()
        if not self._grow(own, end - page):
            return None
        self._held.setdefault(sequence, []).append(own)
        fork = table.head(page)
        fork.ranges += own.ranges
        computed = sequence.computed - page
        if computed > 0:
            source, target = (int(t.slots(page, page + 1)[0]) for t in (table, fork))
            self._pool.copy_slots(source, target, computed)
        return fork
