"""Plans of a simulation: steps with arguments and orders. A seed or hypothesis draws them; failing plans are shrunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, TypeVar

from hypothesis import strategies as st

F = TypeVar("F", bound=Callable[..., Any])
ORDERS = 1 << 20


@dataclass(frozen=True)
class Step:
    """A call of the machine's method ``name`` with ``arguments``; ``order`` seeds the interleaving meanwhile."""

    name: str
    arguments: tuple[tuple[str, Any], ...]
    order: int = 0

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments)
        return f"{self.name}({given}) @{self.order}"


@dataclass(frozen=True)
class Draw:
    """Distribution of an argument, for a ``Random`` and for hypothesis."""

    sample: Callable[[Random], Any]
    strategy: st.SearchStrategy[Any]


def integers(low: int, high: int) -> Draw:
    return Draw(lambda random: random.randint(low, high), st.integers(low, high))


def one_of(values: Sequence[Any]) -> Draw:
    return Draw(lambda random: random.choice(values), st.sampled_from(values))


def tuples(of: Draw, low: int, high: int) -> Draw:
    return Draw(
        lambda random: tuple(of.sample(random) for _ in range(random.randint(low, high))),
        st.lists(of.strategy, min_size=low, max_size=high).map(tuple),
    )


def step(weight: int = 1, **draws: Draw) -> Callable[[F], F]:
    """Decorator that makes a method a step of plans, ``weight`` times as likely as other steps."""

    def mark(method: F) -> F:
        method.draws, method.weight = draws, weight  # type: ignore[attr-defined]
        return method

    return mark


class Catalogue:
    """All steps of a machine class."""

    def __init__(self, machine: type) -> None:
        self._steps = {
            name: method for name in sorted(dir(machine)) if hasattr(method := getattr(machine, name), "draws")
        }
        self._names = [name for name, method in self._steps.items() for _ in range(method.weight)]

    def sample(self, seed: int, count: int) -> list[Step]:
        """Draw a plan from a seed."""
        random = Random(seed)
        return [self._sample(random) for _ in range(count)]

    def _sample(self, random: Random) -> Step:
        name = random.choice(self._names)
        drawn = tuple((n, draw.sample(random)) for n, draw in self._steps[name].draws.items())
        return Step(name, drawn, random.randrange(1, ORDERS))

    def plans(self, most: int) -> st.SearchStrategy[list[Step]]:
        """Return a strategy of plans of up to ``most`` steps."""

        def of(name: str) -> st.SearchStrategy[Step]:
            draws = {n: draw.strategy for n, draw in self._steps[name].draws.items()}
            drawn = st.fixed_dictionaries(draws).map(lambda given: tuple(given.items()))
            return st.builds(Step, st.just(name), drawn, st.integers(0, ORDERS - 1))

        return st.lists(st.sampled_from(self._names).flatmap(of), max_size=most)


def shrunk(plan: Sequence[Step], fails: Callable[[Sequence[Step]], bool], most_steps: int = 60_000) -> list[Step]:
    """Return a shorter plan that also fails; tries at most ``most`` plans."""
    left, steps = list(plan), 0

    def still(shorter: Sequence[Step]) -> bool:
        nonlocal steps
        steps += len(shorter)
        return steps <= most_steps and fails(shorter)

    size = max(1, len(left) // 2)
    while True:
        at, before = 0, len(left)
        while at < len(left):
            shorter = left[:at] + left[at + size :]
            if still(shorter):
                left = shorter
            else:
                at += size
        if (size == 1 and len(left) == before) or steps > most_steps:
            break
        size = max(1, size // 2)
    for i, one in enumerate(left):
        if one.order and still(plainer := [*left[:i], replace(one, order=0), *left[i + 1 :]]):
            left = plainer
    return left
