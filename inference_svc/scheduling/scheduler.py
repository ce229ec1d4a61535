"""Scheduler: chooses the rows of a step and the sequences to preempt.

The functions are pure: numbers in, decisions out. ``waiting_order`` chooses which sequence to admit.

Rows: each decoding sequence gets one row. The oldest prompt gets half of the remaining rows, and the shortest prompts
get the rest, so that a short prompt does not wait for a long one and a long prompt always progresses. A sequence whose
layers are still loading runs only if no other sequence is ready, because the step must wait for its layers. A step runs
at most one such sequence. While any sequence decodes, the prefill budget limits prompt rows.

Blocks: if a sequence needs a block and none is free, the youngest sequence is preempted. The oldest is never preempted,
so that sequences finish one after the other. Admission leaves free blocks for running sequences, because each admission
would otherwise cause a preemption.

Draft tokens get the rows and blocks that remain after all sequences have got their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Prompts get at least 1 / _PREFILL_SHARE of the rows, even if decoding sequences could use all.
_PREFILL_SHARE = 4
# Minimum rows of a prompt in a step, because a step with fewer rows costs too much per row.
_MIN_CHUNK_TOKENS = 32
_RESERVE_SHARE = 100


@dataclass(slots=True)  # not frozen: each step makes one for every sequence
class SchedulerEntry:
    """A running sequence, in numbers."""

    arrived_at: float
    num_uncomputed: int  # at least one
    free_slots: int  # token slots in its blocks behind the computed tokens
    exclusive_pages: int  # blocks that its preemption would free
    steps_skipped: int = 0  # steps since its last row
    is_loading: bool = False  # layers are still being loaded
    num_draft_tokens: int = 0  # draft tokens to verify behind its own tokens
    in_overflow: bool = False  # its blocks are in the overflow: preemption would free no pool block


@dataclass(frozen=True)
class StepPlan:
    """Rows of the next step, draft rows, and the sequences to preempt.

    ``rows`` and ``draft_rows`` are ``(index of the entry, number of tokens)``; ``preempted`` are indexes of entries.
    """

    rows: tuple[tuple[int, int], ...] = ()
    preempted: tuple[int, ...] = ()
    draft_rows: tuple[tuple[int, int], ...] = ()


def pages_to_reserve(pages: int, running: int) -> int:
    """Number of blocks that an admission must leave free: one per running sequence, at least 1% of the pool."""
    return max(running, pages // _RESERVE_SHARE) if running else 0


def most_pages(entries: Sequence[SchedulerEntry], page_tokens: int) -> int:
    """Upper bound of the blocks that a step may need."""
    missing = (e.num_uncomputed + e.num_draft_tokens - e.free_slots for e in entries)
    return sum(-(-tokens // page_tokens) for tokens in missing if tokens > 0)


def plan_step(
    entries: Sequence[SchedulerEntry],
    budget: int,
    free_pages: int,
    page_tokens: int,
    pending_pages: int = 0,
    prompt_rows: int | None = None,
) -> StepPlan:
    """Plans the next step: ``budget`` rows at most, ``prompt_rows`` of them for prompts while others decode.

    ``free_pages`` counts free and evictable blocks. ``pending_pages`` counts blocks that will be free after pending
    saves. While there are such blocks, no sequence is preempted: a sequence that needs more than the free blocks waits
    a step.
    """
    order = sorted(range(len(entries)), key=lambda i: entries[i].arrived_at)
    ready = [i for i in order if not entries[i].is_loading] or order[:1]
    counts = _share(entries, ready, budget, prompt_rows)
    rows: dict[int, int] = {}
    preempted: list[int] = []
    for i in [i for i in order if counts.get(i)]:
        if i in preempted:
            continue
        needed = -(-(counts[i] - entries[i].free_slots) // page_tokens)
        while needed > free_pages and not pending_pages:
            left = [v for v in order if v not in preempted and not entries[v].in_overflow]
            younger = left[left.index(i) + 1 :]
            # A loading sequence frees its blocks only when its load ends, so prefer other victims.
            victim = max(younger, key=lambda v: (not entries[v].is_loading, entries[v].arrived_at), default=i)
            if victim == left[0]:
                break  # no other sequence has blocks: this one waits for blocks of pending saves
            preempted.append(victim)
            free_pages += entries[victim].exclusive_pages
            if victim == i:
                break
        if i not in preempted and needed <= free_pages:
            rows[i] = counts[i]
            free_pages -= max(0, needed)
        elif pending_pages:
            free_pages = 0  # reserved for this sequence, together with the pending blocks
    drafts = _share_draft_rows(entries, rows, budget - sum(rows.values()), free_pages, page_tokens)
    return StepPlan(tuple(rows.items()), tuple(preempted), drafts)


def plan_decode_step(sequences: int) -> StepPlan:
    """Plans a step in which every sequence decodes, with rows and blocks for all: the usual step, without a search."""
    return StepPlan(tuple((i, 1) for i in range(sequences)))


def _share_draft_rows(
    entries: Sequence[SchedulerEntry], rows: dict[int, int], budget: int, free_pages: int, page_tokens: int
) -> tuple[tuple[int, int], ...]:
    """Divides the remaining rows and blocks among the draft tokens of fully scheduled sequences."""
    out = []
    for i, count in rows.items():
        entry = entries[i]
        wanted = min(entry.num_draft_tokens, budget) if count == entry.num_uncomputed else 0
        inside = -(count - entry.free_slots) % page_tokens if count > entry.free_slots else entry.free_slots - count
        pages = max(0, -(-(wanted - inside) // page_tokens))
        if pages > free_pages:
            wanted, pages = min(wanted, inside), 0
        if wanted:
            out.append((i, wanted))
            budget -= wanted
            free_pages -= pages
    return tuple(out)


def _share(
    entries: Sequence[SchedulerEntry], ready: Sequence[int], budget: int, prompt_rows: int | None
) -> dict[int, int]:
    """Divides the rows among ``ready`` sequences, which are in order of arrival."""
    decoding = [i for i in ready if entries[i].num_uncomputed == 1]
    prompts = [i for i in ready if entries[i].num_uncomputed > 1]
    kept = max(1, budget // _PREFILL_SHARE) if prompts else 0
    # Sequences that were skipped longest are first.
    decoding.sort(key=lambda i: -entries[i].steps_skipped)
    counts = dict.fromkeys(decoding[: max(budget - kept, 0)], 1)
    left = budget - len(counts)
    if not prompts:
        return counts
    if counts and prompt_rows is not None:
        left = min(left, prompt_rows)
    oldest, *others = prompts
    counts[oldest] = min(entries[oldest].num_uncomputed, -(-left // 2) if others else left)
    left -= counts[oldest]
    for i in sorted(others, key=lambda i: entries[i].num_uncomputed):
        take = min(entries[i].num_uncomputed, left)
        if take == entries[i].num_uncomputed or take >= _MIN_CHUNK_TOKENS:
            counts[i] = take
            left -= take
    counts[oldest] += min(left, entries[oldest].num_uncomputed - counts[oldest])
    return counts
