"""The scheduler, alone: nobody starves, budgets and pages hold, and preemptions do not follow each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.scheduling.scheduler import (
    SchedulerEntry,
    StepPlan,
    most_pages,
    pages_to_reserve,
    plan_decode_step,
    plan_step,
)
from inference_svc.scheduling.waiting_order import AGE_TOKENS_PER_SECOND, MAX_HOLD_SECONDS, Candidate, select_waiting

PAGE = 32

works = st.lists(
    st.builds(
        SchedulerEntry,
        arrived_at=st.floats(0, 100),
        num_uncomputed=st.one_of(st.just(1), st.integers(1, 2000)),
        free_slots=st.integers(0, 300),
        exclusive_pages=st.integers(1, 20),
        steps_skipped=st.integers(0, 9),
        is_loading=st.booleans(),
    ),
    max_size=20,
)


def needed(work: SchedulerEntry, count: int) -> int:
    return max(0, -(-(count - work.free_slots) // PAGE))


@given(works, st.integers(1, 600), st.integers(0, 60))
def test_budget_and_pages_hold(given: list[SchedulerEntry], budget: int, free: int) -> None:
    step = plan_step(given, budget, free, PAGE)
    counts = dict(step.rows)
    assert sum(counts.values()) <= budget
    assert all(0 < n <= given[i].num_uncomputed for i, n in counts.items())
    assert not set(counts) & set(step.preempted)
    assert sum(needed(given[i], n) for i, n in counts.items()) <= free + sum(
        given[i].exclusive_pages for i in step.preempted
    )


@given(works)
def test_a_decode_step_is_planned_as_any_step(given: list[SchedulerEntry]) -> None:
    given = [replace(one, num_uncomputed=1, is_loading=False) for one in given]
    pages, plan = sum(needed(one, 1) for one in given), plan_decode_step(len(given))
    assert replace(plan_step(given, len(given), pages, PAGE), rows=()) == replace(plan, rows=())
    assert sorted(plan_step(given, len(given), pages, PAGE).rows) == list(plan.rows)


@given(works, st.integers(1, 600), st.integers(0, 60))
def test_pages_are_taken_from_the_youngest_and_never_from_the_oldest(
    given: list[SchedulerEntry], budget: int, free: int
) -> None:
    step = plan_step(given, budget, free, PAGE)
    if step.preempted:
        oldest = min(range(len(given)), key=lambda i: given[i].arrived_at)
        assert oldest not in step.preempted
        kept = [w.arrived_at for i, w in enumerate(given) if i not in step.preempted and not w.is_loading]
        for i in step.preempted:
            younger = [a for a in kept if a > given[i].arrived_at]
            assert not younger or given[i].is_loading, "somebody younger kept its pages"


def test_pages_come_from_who_is_not_being_loaded_first() -> None:
    growing, loaded = SchedulerEntry(0, 1, 0, 5), SchedulerEntry(1, 1, 9, 5)
    loading, older = SchedulerEntry(2, 500, 999, 5, is_loading=True), SchedulerEntry(0.5, 500, 999, 5, is_loading=True)
    assert plan_step([growing, loaded, loading], 64, 0, PAGE).preempted == (1,)
    assert plan_step([growing, older, loaded], 64, 0, PAGE).preempted == (2,)
    assert plan_step([growing, loading], 64, 0, PAGE).preempted == (1,), "where there is nobody else"


@given(works, st.integers(1, 600))
def test_with_pages_for_all_somebody_ready_always_goes_on(given: list[SchedulerEntry], budget: int) -> None:
    step = plan_step(given, budget, 10**6, PAGE)
    assert not step.preempted
    assert bool(step.rows) == bool(given)


@given(works, st.integers(1, 600), st.integers(0, 9))
def test_the_bound_of_a_steps_pages_is_enough(given: list[SchedulerEntry], budget: int, drafted: int) -> None:
    """Exclusive pages, which preemptions free, are counted only above it."""
    given = [replace(one, num_draft_tokens=drafted) for one in given]
    bound = most_pages(given, PAGE)
    step = plan_step(given, budget, bound, PAGE)
    assert step == plan_step(given, budget, 10**6, PAGE)
    assert not step.preempted
    drafts = dict(step.draft_rows)
    assert sum(needed(given[i], n + drafts.get(i, 0)) for i, n in step.rows) <= bound


@given(works, st.integers(16, 600))
def test_who_waits_for_layers_delays_nobody(given: list[SchedulerEntry], budget: int) -> None:
    step = plan_step(given, budget, 10**6, PAGE)
    gated = [i for i, _ in step.rows if given[i].is_loading]
    if any(not w.is_loading for w in given):
        assert not gated
    else:
        assert len(gated) == min(1, len(given)), "two would wait for each other's layers"


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    long, short = SchedulerEntry(0, 5000, 10**4, 1), SchedulerEntry(1, 100, 10**4, 1)
    assert dict(plan_step([long, short], 512, 0, PAGE).rows) == {0: 412, 1: 100}
    assert dict(plan_step([long, replace(short, num_uncomputed=3000)], 512, 0, PAGE).rows) == {0: 256, 1: 256}


def test_decoding_leaves_a_share_to_prompts_and_takes_turns() -> None:
    decoding = [SchedulerEntry(i, 1, 99, 1, steps_skipped=int(i >= 12)) for i in range(16)]
    step = plan_step([*decoding, SchedulerEntry(50, 100, 999, 1)], 16, 0, PAGE)
    served = dict(step.rows)
    assert served[16] == 4
    assert {12, 13, 14, 15} <= set(served), "who was passed over goes first"


@dataclass
class _Life:
    """A simulated sequence."""

    arrived: float
    prompt: int
    answer: int
    computed: int = 0
    tokens: int = 0
    pages: int = 0
    passed_over: int = 0


lives = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=12)


@given(lives, st.integers(4, 128), st.integers(12, 24))
def test_everybody_ends(given: list[tuple[int, int, int]], budget: int, pages: int) -> None:
    """Requests come at all times into a pool that holds the largest of them and hardly more. Each ends, and nobody
    decoding is passed over more often than there are others."""
    coming = [_Life(at, prompt, answer, tokens=prompt) for prompt, answer, at in given]
    coming.sort(key=lambda life: life.arrived)
    waiting, running, done, preemptions, now = list[_Life](), list[_Life](), 0, 0, 0
    while done < len(given):
        now += 1
        assert now < 4000, "somebody starves"
        waiting += [life for life in coming if life.arrived == now - 1]
        free = pages - sum(life.pages for life in running)
        while waiting:
            i = select_waiting([Candidate(now - life.arrived, preempted=life.computed < 0) for life in waiting])
            assert i is not None
            take = -(-(waiting[i].tokens + 1) // PAGE)
            if free - take < pages_to_reserve(pages, len(running)):
                break
            life = waiting.pop(i)
            life.pages, life.computed, free = take, 0, free - take
            running.append(life)
        step = plan_step([_work(life) for life in running], budget, free, PAGE) if running else StepPlan()
        preemptions += len(step.preempted)
        gone = [running[i] for i in step.preempted]
        for life in running:
            life.passed_over += 1
        for i, count in step.rows:
            life = running[i]
            life.pages += needed(_work(life), count)
            life.computed, life.passed_over = life.computed + count, 0
            life.tokens += life.computed == life.tokens
        for life in gone:
            life.pages, life.computed = 0, -1
            running.remove(life)
            waiting.insert(0, life)
        assert sum(life.pages for life in running) <= pages
        assert all(life.passed_over <= len(given) for life in running if life.tokens - life.computed == 1)
        for life in [life for life in running if life.tokens - life.prompt >= life.answer]:
            running.remove(life)
            done += 1
    assert preemptions <= 8 * len(given), "preemptions follow each other"


def _work(life: _Life) -> SchedulerEntry:
    room = life.pages * PAGE - life.computed
    return SchedulerEntry(life.arrived, life.tokens - life.computed, room, life.pages, life.passed_over)


@given(st.lists(st.builds(Candidate, st.floats(0, 1000), st.integers(0, 10**5), st.booleans()), min_size=1))
def test_waiting_wins_in_the_end(given: list[Candidate]) -> None:
    most = max(c.known for c in given)
    oldest = max(range(len(given)), key=lambda i: given[i].waited_seconds)
    if given[oldest].held_back:
        given[oldest] = replace(given[oldest], waited_seconds=given[oldest].waited_seconds + MAX_HOLD_SECONDS)
    others = max((c.waited_seconds for i, c in enumerate(given) if i != oldest), default=0.0)
    ahead = given[oldest].waited_seconds - others
    if ahead * AGE_TOKENS_PER_SECOND > most + 1:
        assert select_waiting(given) == oldest


def test_who_is_held_back_waits_and_who_was_preempted_does_not() -> None:
    assert select_waiting([Candidate(1, held_back=True)]) is None
    assert select_waiting([Candidate(MAX_HOLD_SECONDS, held_back=True)]) == 0
    assert select_waiting([Candidate(9, 500), Candidate(0, preempted=True)]) == 1
    assert select_waiting([]) is None


@pytest.mark.parametrize(("pages", "running", "want"), [(1000, 0, 0), (1000, 3, 10), (1000, 40, 40), (10, 2, 2)])
def test_an_admission_leaves_room_to_grow(pages: int, running: int, want: int) -> None:
    assert pages_to_reserve(pages, running) == want
