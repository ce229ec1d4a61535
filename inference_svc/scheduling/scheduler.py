"""Who is admitted, who gets rows in the next forward, and who gives its pages back. Pure: numbers in, decisions out.

Admission: longest known prefix first, with ageing: waiting a second counts as much as ``AGE_TOKENS_PER_SECOND`` known
tokens. Who was preempted goes before everybody.

Rows: each decoding sequence gets one; of what is left, the oldest prompt gets half and the shortest ones the rest, so
that a short prompt does not wait for a long one, and a long one never stands still. Sequences whose layers are still
being loaded wait for the others, who would have to wait for those layers, and run, one at a time, when nobody else
does. While anybody decodes, prompts get no more rows than a step has time for.

Pages: whoever needs one takes it from the youngest. The oldest is never preempted, so that it ends, and after it the
next. What is admitted must leave pages for the others to grow into, or preemptions would follow each other.

Guesses to be verified get what rows and pages are left when everybody has their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AGE_TOKENS_PER_SECOND = 2000.0
# For longer, nobody is held back for another one's sake.
MAX_HOLD_SECONDS = 60.0
# Prompts leave, and get, at least this share of the rows when decoding alone could fill them.
_PREFILL_SHARE = 4
# Pieces of a prompt shorter than this cost more than they bring on.
_MIN_CHUNK_TOKENS = 32
_RESERVE_SHARE = 100


@dataclass(frozen=True)
class Candidate:
    """A waiting sequence. ``known`` of its leading tokens need not be computed; ``held_back`` when a running sequence
    is just computing more of them."""

    waited_seconds: float
    known: int = 0
    held_back: bool = False
    preempted: bool = False


@dataclass(frozen=True)
class SchedulerEntry:
    """A running sequence."""

    arrived: float
    missing: int  # tokens to compute, at least one
    room: int  # tokens that its pages have room for behind the computed ones
    pages: int  # pages that are free when it goes
    passed_over: int = 0  # forwards since it last had a row
    gated: bool = False  # layers are still being loaded
    guesses: int = 0  # tokens that it would verify behind those it has
    apart: bool = False  # its pages are others than those that everybody wants


@dataclass(frozen=True)
class StepPlan:
    """The next forward: ``rows`` are ``(index, tokens)`` of the works that get any, ``guesses`` the same for guesses
    behind them; ``preempted`` are to go first."""

    rows: tuple[tuple[int, int], ...] = ()
    preempted: tuple[int, ...] = ()
    guesses: tuple[tuple[int, int], ...] = ()


def select_waiting(candidates: Sequence[Candidate]) -> int | None:
    """The index of the sequence to admit; None when all are held back."""
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


def blocks_to_reserve(pages: int, running: int) -> int:
    """Pages of a pool that an admission must leave to so many running sequences: one for each to grow into, and a
    hundredth of all."""
    return max(running, pages // _RESERVE_SHARE) if running else 0


def plan_step(
    works: Sequence[SchedulerEntry],
    budget: int,
    free_pages: int,
    page_tokens: int,
    coming: int = 0,
    prompt_rows: int | None = None,
) -> StepPlan:
    """Rows for the next forward, ``budget`` at most, and ``prompt_rows`` of them for prompts while others decode.
    ``free_pages`` are those that nobody in need of them holds; while others are ``coming``, nobody is preempted, and
    whoever needs more than there are waits."""
    order = sorted(range(len(works)), key=lambda i: works[i].arrived)
    ready = [i for i in order if not works[i].gated] or order[:1]
    counts = _share(works, ready, budget, prompt_rows)
    rows: dict[int, int] = {}
    preempted: list[int] = []
    for i in [i for i in order if counts.get(i)]:
        if i in preempted:
            continue
        needed = -(-(counts[i] - works[i].room) // page_tokens)
        while needed > free_pages and not coming:
            left = [v for v in order if v not in preempted and not works[v].apart]
            younger = left[left.index(i) + 1 :]
            # Who is being loaded gives its pages back only when that is over.
            victim = max(younger, key=lambda v: (not works[v].gated, works[v].arrived), default=i)
            if victim == left[0]:
                break  # nobody else has pages to give: it waits for those that are being stored
            preempted.append(victim)
            free_pages += works[victim].pages
            if victim == i:
                break
        if i not in preempted and needed <= free_pages:
            rows[i] = counts[i]
            free_pages -= max(0, needed)
        elif coming:
            free_pages = 0  # for it, with those that come
    guesses = _guesses(works, rows, budget - sum(rows.values()), free_pages, page_tokens)
    return StepPlan(tuple(rows.items()), tuple(preempted), guesses)


def _guesses(
    works: Sequence[SchedulerEntry], rows: dict[int, int], budget: int, free_pages: int, page_tokens: int
) -> tuple[tuple[int, int], ...]:
    """Rows for guesses behind all that is missing of a work, within what is left."""
    out = []
    for i, count in rows.items():
        work = works[i]
        wanted = min(work.guesses, budget) if count == work.missing else 0
        inside = -(count - work.room) % page_tokens if count > work.room else work.room - count
        pages = max(0, -(-(wanted - inside) // page_tokens))
        if pages > free_pages:
            wanted, pages = min(wanted, inside), 0
        if wanted:
            out.append((i, wanted))
            budget -= wanted
            free_pages -= pages
    return tuple(out)


def _share(
    works: Sequence[SchedulerEntry], ready: Sequence[int], budget: int, prompt_rows: int | None
) -> dict[int, int]:
    """How many tokens each of the sequences computes, who are in the order of their arrival."""
    decoding = [i for i in ready if works[i].missing == 1]
    prompts = [i for i in ready if works[i].missing > 1]
    kept = max(1, budget // _PREFILL_SHARE) if prompts else 0
    # Whoever was passed over is first next time.
    decoding.sort(key=lambda i: -works[i].passed_over)
    counts = dict.fromkeys(decoding[: max(budget - kept, 0)], 1)
    left = budget - len(counts)
    if not prompts:
        return counts
    if counts and prompt_rows is not None:
        left = min(left, prompt_rows)
    oldest, *others = prompts
    counts[oldest] = min(works[oldest].missing, -(-left // 2) if others else left)
    left -= counts[oldest]
    for i in sorted(others, key=lambda i: works[i].missing):
        take = min(works[i].missing, left)
        if take == works[i].missing or take >= _MIN_CHUNK_TOKENS:
            counts[i] = take
            left -= take
    counts[oldest] += min(left, works[oldest].missing - counts[oldest])
    return counts
