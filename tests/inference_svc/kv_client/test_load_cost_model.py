"""Decision between loading and computing."""

from __future__ import annotations

import pytest

from inference_svc.kv_client.load_cost_model import LoadCostModel


def test_a_token_behind_a_hit_costs_what_tokens_cost() -> None:
    """One forward for the last token of a prompt takes as long as a few tokens do; none of them is as dear as that."""
    economy = LoadCostModel()
    assert economy.seconds_per_token(1, 0.064) == pytest.approx(0.002), "as if there had been enough of them to tell"
    economy.record_prefill(1000, 1.0)
    economy.record_prefill(1, 0.05)  # says nothing about a token
    assert economy.prefill_seconds_per_token == pytest.approx(0.001)
    assert economy.seconds_per_token(1, 0.05) == pytest.approx(0.001)
    assert economy.seconds_per_token(500, 1.0) == pytest.approx(0.002)


def test_loads_that_cost_more_than_computing_are_left_and_tried_again() -> None:
    economy = LoadCostModel()
    assert economy.should_load(1000), "nothing is known"
    economy.record_prefill(1000, 1.0)
    economy.record_load(1000, 0.1)
    assert all(economy.should_load(1000) for _ in range(40))
    economy.record_timeout(1000, 5.0)
    tried = [economy.should_load(1000) for _ in range(64)]
    assert 0 < sum(tried) <= 8
    economy.record_load(1000, 0.1)  # what it found now counts, not what had been
    assert economy.should_load(1000)


def test_one_slow_load_decides_nothing_and_two_do() -> None:
    """A disk that is held up for a moment must not keep the next fifteen prompts from the cache, not even where it was
    the first load of all."""
    economy = LoadCostModel()
    economy.record_load(1000, 5.0)  # right after a start, when nothing was computed yet
    economy.record_prefill(1000, 1.0)
    economy.record_load(1000, 5.0)
    assert all(economy.should_load(1000) for _ in range(40)), "the first load of all was slow"
    economy.record_load(1000, 0.1)
    economy.record_load(100, 3.0)
    assert all(economy.should_load(100) for _ in range(40)), "a slow one after a fast one"
    economy.record_load(100, 3.0)
    assert not all(economy.should_load(100) for _ in range(15)), "two in a row"


def test_what_a_load_costs_at_least_is_counted_once() -> None:
    """A long load's time has that part in it, which the short ones showed."""
    economy = LoadCostModel()
    economy.record_prefill(1000, 1.0)
    economy.record_load(100, 0.05)
    economy.record_load(300, 0.29)
    assert economy.load_pays(1000), "0.05 s and 0.8 ms a token, where computing takes 1 ms"


def test_another_daemon_is_tried_at_once() -> None:
    economy = LoadCostModel()
    economy.record_prefill(1000, 1.0)
    for _ in range(2):
        economy.record_load(1000, 5.0)
    assert not economy.load_pays(1000)
    economy.reset_loads()
    assert economy.load_pays(1000)


def test_a_load_is_waited_for_as_long_as_computing_takes_some_times_over() -> None:
    economy = LoadCostModel()
    assert economy.load_timeout(1000) == float("inf"), "nothing is known"
    economy.record_prefill(1000, 10.0)
    assert 10.0 <= economy.load_timeout(1000) < 100.0
    assert economy.load_timeout(2000) == pytest.approx(2 * economy.load_timeout(1000))
