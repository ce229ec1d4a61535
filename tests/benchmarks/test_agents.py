"""Histories of agents: branches and compactions."""

from __future__ import annotations

from benchmarks import agents


def test_agents_forget_and_keep_as_many_turns_as_they_are_told() -> None:
    def agent() -> agents.Agent:
        return agents.Agent([0], [[1], [2], [3]])

    branched, compacted = [], []
    for count in (0, 1, 5):
        one, other = agent(), agent()
        one.branch(count)
        other.compact([9], count)
        branched.append(one.turns)
        compacted.append(other.turns)
    assert branched == [[[1], [2], [3]], [[1], [2]], []]
    assert compacted == [[[9]], [[9], [3]], [[9], [1], [2], [3]]]
