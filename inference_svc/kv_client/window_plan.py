"""What of a stored prefix is loaded: all of it, or, for layers with a sliding window, what they see of it.

Where all layers have one, a sequence has pages for about as much as that, and they are moved to where the prefix ends.
Where only some have, the others get what lies further back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvkernels import Piece, unpack_chunks

from inference_svc.kv_pool.block_table import PAGE_TOKENS, BlockTable
from inference_svc.kv_pool.disk_overflow import runs_of
from inference_svc.kv_pool.kv_pool import KVPool


@dataclass(frozen=True)
class WindowPlan:
    """Of a prompt, ``tokens`` leading tokens are used. All layers get those from ``start`` on, in ``table``'s pages."""

    tokens: int
    start: int
    table: BlockTable


def plan_window(
    pool: KVPool, table: BlockTable, computed: int, found: int, save_from: int | None, unloadable: int = 0
) -> WindowPlan:
    """``found`` leading tokens are stored, of which the first ``passed`` cannot be loaded; of ``computed`` ones,
    ``table``'s pages have what is seen from behind them. What comes after ``goes_on`` tokens is stored later, unless
    that is None, and should be there for it. The table stays as it is."""
    if found <= computed or not pool.max_window:
        return WindowPlan(found, computed, table)
    if found > table.tokens:
        # Pages for as much as a window needs: those behind what is computed are moved to where they are needed.
        at = -(-computed // PAGE_TOKENS) * PAGE_TOKENS
        seen = pool.first_visible(found)
        for start in (min(seen, pool.round_to_step(seen if save_from is None else save_from)), seen):
            if start >= at and found - start <= table.tokens - at:
                return WindowPlan(found, start, table.shift(at, start))
        found = table.tokens
    start = pool.first_visible(found) if save_from is None else min(pool.first_visible(found), save_from)
    if max(start, computed) < unloadable:
        return WindowPlan(computed, computed, table)
    if start <= computed:
        return WindowPlan(found, computed, table)
    return WindowPlan(
        found, start, BlockTable(list(table.ranges), first_valid_token=start, in_overflow=table.in_overflow)
    )


def load_layers(
    pool: KVPool, pieces: Sequence[Piece], far: Sequence[Piece], groups: Sequence[range]
) -> Iterator[range]:
    """Writes pieces of chunks into the pool, and of ``far`` ones the layers that see all; gives each group of layers
    when the pool holds it."""
    wide = set(pool.wide_layers)
    runs = [runs_of([i for i in group if i in wide]) for group in groups]
    behind = unpack_chunks(pool.keys, pool.values, far, [run for some in runs for run in some]) if far else iter(())
    near = unpack_chunks(pool.keys, pool.values, pieces, groups) if pieces else iter(groups)
    for group, some in zip(near, runs, strict=True):
        for _ in zip(some, behind, strict=False):  # one after the other as they are asked for
            pass
        yield group
