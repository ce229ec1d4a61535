"""Scheduler: admission order, rows per step, preemption. Pure: numbers in, decisions out.

Admission: longest known prefix first, with ageing: a second of waiting counts as ``AGE_TOKENS_PER_SECOND`` known
tokens. A preempted sequence goes first.

Rows: each decoding sequence gets one. Of the rest, the oldest prompt gets half and the shortest ones the remainder, so
that a short prompt does not wait for a long one, and a long one never stands still. Sequences whose layers are still
loading run, one at a time, only when no other sequence is ready: a step with them waits for those layers. While any
sequence decodes, prompts get no more rows than the prefill budget allows.

Pages: a sequence that needs a page takes it from the youngest. The oldest is never preempted, so that it finishes, and
then the next. Admission must leave pages for the others to grow into, or preemptions would follow each other.

Draft tokens get the rows and pages that are left when every sequence has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AGE_TOKENS_PER_SECOND = 2000.0
# A sequence is held back for another one's prefix no longer than this.
MAX_HOLD_SECONDS = 60.0
# Prompts get at least this share of the rows (one in so many) when decoding alone could fill them.
_PREFILL_SHARE = 4
# Shorter chunks of a prompt cost more than they gain.
_MIN_CHUNK_TOKENS = 32
_RESERVE_SHARE = 100


@dataclass(frozen=True)
class Candidate:
    """A waiting sequence.

    ``known`` leading tokens need not be computed. ``held_back``: a running sequence is about to have more of them.
    """

    waited_seconds: float
    known: int = 0
    held_back: bool = False
    preempted: bool = False


@dataclass(frozen=True)
class SchedulerEntry:
    """A running sequence."""

    arrived_at: float
    num_uncomputed: int  # at least one
    free_slots: int  # token slots of its pages behind the computed tokens
    exclusive_pages: int  # pages that are free once it is preempted
    steps_skipped: int = 0  # steps since its last row
    is_loading: bool = False  # layers are still being loaded
    num_draft_tokens: int = 0  # to verify behind its own tokens
    in_overflow: bool = False  # its pages are in the disk overflow, which no other sequence waits for


@dataclass(frozen=True)
class StepPlan:
    """Rows of the next step: ``(index, tokens)`` of entries, the same for draft tokens, and entries to preempt."""

    rows: tuple[tuple[int, int], ...] = ()
    preempted: tuple[int, ...] = ()
    draft_rows: tuple[tuple[int, int], ...] = ()


def select_waiting(candidates: Sequence[Candidate]) -> int | None:
    """Returns the index of the sequence to admit; None when all are held back."""
    best, chosen = -1.0, None
    for i, c in enumerate(candidates):
        if c.preempted:
            return i
        if c.held_back and c.waited_seconds < MAX_HOLD_SECONDS:
            continue
        score = c.known + c.waited_seconds * AGE_TOKENS_PER_SECOND
        if score > best:
            best, chosen = score, i
    return chosen


def pages_to_reserve(pages: int, running: int) -> int:
    """Pages that an admission must leave for running sequences: one for each to grow into, at least 1% of the pool."""
    return max(running, pages // _RESERVE_SHARE) if running else 0


def plan_step(
    entries: Sequence[SchedulerEntry],
    budget: int,
    free_pages: int,
    page_tokens: int,
    pending_pages: int = 0,
    prompt_rows: int | None = None,
) -> StepPlan:
    """Plans the next step: ``budget`` rows at most, ``prompt_rows`` of them for prompts while others decode.

    ``free_pages``: pages that are free or evictable. While ``pending_pages`` (being stored, about to be freed) is above
    0, no sequence is preempted; one that needs more pages than are free waits a step.
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
            # A sequence that is loading frees its pages only once the load is over.
            victim = max(younger, key=lambda v: (not entries[v].is_loading, entries[v].arrived_at), default=i)
            if victim == left[0]:
                break  # no other sequence has pages: it waits for those that are being stored
            preempted.append(victim)
            free_pages += entries[victim].exclusive_pages
            if victim == i:
                break
        if i not in preempted and needed <= free_pages:
            rows[i] = counts[i]
            free_pages -= max(0, needed)
        elif pending_pages:
            free_pages = 0  # kept for it, together with the pending ones
    drafts = _share_draft_rows(entries, rows, budget - sum(rows.values()), free_pages, page_tokens)
    return StepPlan(tuple(rows.items()), tuple(preempted), drafts)


def _share_draft_rows(
    entries: Sequence[SchedulerEntry], rows: dict[int, int], budget: int, free_pages: int, page_tokens: int
) -> tuple[tuple[int, int], ...]:
    """Divides remaining rows and pages among the draft tokens of fully scheduled sequences."""
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
    """Divides the rows among ready sequences, which are in order of arrival."""
    decoding = [i for i in ready if entries[i].num_uncomputed == 1]
    prompts = [i for i in ready if entries[i].num_uncomputed > 1]
    kept = max(1, budget // _PREFILL_SHARE) if prompts else 0
    # A sequence that was skipped is first next time.
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
