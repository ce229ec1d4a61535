"""Branch tables: block tables of draft-tree branches, for one step.

Branches have tokens at the same positions, and a row attends to the earlier keys in its block table. So each branch has
its own table: it shares the sequence's blocks before the block in which the branch begins, and owns that block and the
later ones. The sequence's computed keys and values in that block are copied. Rows of the same step that precede the
branch write their keys and values into that block, too. So each row sees its keys in the same order and key blocks as
without branches, and gets the same bits. Only accepted rows are copied back to the sequence's blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from kvsidecar.errors import GenerationFailed
from torch import Tensor

from inference_svc.kv_pool.block_table import PAGE_TOKENS, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool
from inference_svc.model_runner.forward_batch import Branch, SequenceSlice
from inference_svc.sequence.generation_request import SpeculationMode
from inference_svc.sequence.sequence import Sequence
from inference_svc.spec_decode.proposer import Draft


class BranchTables:
    """Block tables of draft branches. Owns their blocks until ``free``. Only the engine's thread uses it."""

    def __init__(self, pool: KVPool, grow: Callable[[BlockTable, int], bool]) -> None:
        """``grow(table, tokens)`` extends a table to ``tokens`` tokens; False if the pool has no block left."""
        self._pool, self._grow = pool, grow
        self._held: dict[Sequence, list[BlockTable]] = {}

    @property
    def tables(self) -> list[BlockTable]:
        """Tables of the blocks that branches own."""
        return [table for tables in self._held.values() for table in tables]

    def fork(self, sequence: Sequence, draft: Draft) -> tuple[Branch, ...]:
        """Allocates the branches of a draft tree, except its first path.

        The sequence's table must have slots for the deepest branch. If too few blocks are free, it returns fewer
        branches or none.
        """
        assert sequence.kv.table is not None
        root = len(sequence.tokens) - 1
        first, *others = draft.paths()
        # The table with the keys and values of each sampled row, and the row of each tree node.
        tables = [sequence.kv.table] * (1 + len(first))
        rows = {-1: 0} | {node: row for row, node in enumerate(first, 1)}
        found = list[Branch]()
        for path in others:
            behind = rows.get(draft.parents[path[0]])
            if behind is None:
                continue  # its parent branch got no blocks
            ancestors = [rows[node] for node in draft.ancestors(path[0])]
            start = root + len(ancestors)
            table = self._fork_table(sequence, tables[behind], start, start + len(path))
            if table is None:
                continue
            page = start // PAGE_TOKENS * PAGE_TOKENS
            places = [(row, position) for position, row in enumerate(ancestors, root) if position >= page]
            copied = tuple((row, int(table.slots(position, position + 1)[0])) for row, position in places)
            tokens, at = [draft.tokens[node] for node in path], len(tables)
            found.append(Branch(tokens, start, behind, at, table, copied, sequence.request.adapter))
            rows |= {node: row for row, node in enumerate(path, at)}
            tables += [table] * len(path)
        return tuple(found)

    def commit_row(self, sequence: Sequence, branch: Branch, row: int) -> None:
        """Copies keys and values of a branch's accepted row into the sequence's own blocks."""
        assert sequence.kv.table is not None
        position = branch.start + row - branch.first
        source, target = (int(t.slots(position, position + 1)[0]) for t in (branch.table, sequence.kv.table))
        self._pool.copy_slots(source, target, 1)

    def zero(self, sequence: Sequence) -> None:
        """Zeroes the branch blocks of a failed sequence. Their next owner must not read NaN."""
        for table in self._held.get(sequence, ()):
            self._pool.zero_exclusive(table)

    def check_finite(self, spans: list[tuple[Sequence, SequenceSlice]], logits: Tensor) -> None:
        """Raises GenerationFailed if draft tokens made rows of ``logits [rows, vocabulary]`` NaN or infinite.

        NaN in the keys or values of a draft token also reaches other rows of the same key block. So this zeroes the
        keys and values of the draft tokens and turns speculation off for these sequences.
        """
        if not any(span.num_draft_tokens for _, span in spans):
            return
        # If a hidden state has NaN or infinity, no logit of its row is finite: checking one logit is enough.
        finite, at, not_finite = torch.isfinite(logits[:, 0]).tolist(), 0, list[str]()
        for sequence, span in spans:
            rows = 1 + span.num_draft_tokens if span.wants_logits else 0
            if span.num_draft_tokens and not all(finite[at : at + rows]):
                self._pool.zero_tokens(span.table, span.end - span.num_drafted, span.end)
                self.zero(sequence)
                sequence.speculation.mode = SpeculationMode.OFF
                not_finite.append(sequence.request.id)
            at += rows
        if not_finite:
            raise GenerationFailed(
                f"the model computed NaN or infinity of what was guessed for {', '.join(not_finite)}"
            )

    def free(self) -> None:
        """Frees all blocks; all branches become invalid."""
        for table in self.tables:
            self._pool.free(table)
        self._held.clear()

    def _fork_table(self, sequence: Sequence, table: BlockTable, start: int, end: int) -> BlockTable | None:
        """Forks ``table`` at token ``start``, with slots up to ``end``; None if no block is free.

        Copies the computed keys and values of the block in which the fork begins.
        """
        page = start // PAGE_TOKENS * PAGE_TOKENS
        own = BlockTable()
        if not self._grow(own, end - page):
            return None
        self._held.setdefault(sequence, []).append(own)
        fork = table.prefix(page)
        fork.ranges += own.ranges
        computed = sequence.kv.num_computed - page
        if computed > 0:
            source, target = (int(t.slots(page, page + 1)[0]) for t in (table, fork))
            self._pool.copy_slots(source, target, computed)
        return fork
