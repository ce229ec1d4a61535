"""Window plan: the tokens of a stored prefix to load with sliding windows.

If all layers have a window, a sequence has blocks for about one window only, and the load moves these blocks to the end
of the prefix. If only some layers have a window, the layers without a window also load the tokens before the
window.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference_svc.kv_pool.block_table import PAGE_TOKENS, BlockTable
from inference_svc.kv_pool.kv_pool import KVPool


@dataclass(frozen=True)
class WindowPlan:
    """Tokens of a stored prefix to use and to load.

    The sequence uses the first ``tokens`` tokens; all layers load the tokens from ``start`` on into ``table``.
    """

    tokens: int
    start: int
    table: BlockTable


def plan_window(
    pool: KVPool, table: BlockTable, computed: int, found: int, save_from: int | None, unloadable: int = 0
) -> WindowPlan:
    """Plan the load of a stored prefix of ``found`` tokens; the first ``unloadable`` of them cannot be loaded.

    ``table`` contains the window of the ``computed`` tokens. Tokens from ``save_from`` on (None: no tokens) must be in
    the pool, because they will be saved after the prefill. Does not change the table.
    """
    if found <= computed or not pool.max_window:
        return WindowPlan(found, computed, table)
    if found > table.tokens:
        # The table has blocks for one window only, so its blocks behind the computed tokens move to the prefix's end.
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
