"""How each part of a prompt came about: for whoever asks what was reused."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from inference_svc.context_reuse.reuse_plan import Plan, Positions


class Reading(enum.Enum):
    """How keys and values came about; see ``kvsidecar.inference.v1.Reading``."""

    EXACT = 1
    MOVED = 2
    REPAIRED = 3
    COMPUTED = 4


@dataclass(frozen=True)
class Part:
    """Tokens ``start`` to ``end`` of a prompt."""

    reading: Reading
    start: int
    end: int


def parts_of(tokens: int, exact: int, plan: Plan | None, repaired: Positions | None) -> tuple[Part, ...]:
    """All of a prompt of ``tokens`` in order, neighbours different: ``exact`` leading tokens were read before, and with
    a ``plan`` its approximate ones, of which those at ``repaired`` were computed again."""
    found = np.full(tokens, Reading.COMPUTED.value, np.uint8)
    found[:exact] = Reading.EXACT.value
    if plan is not None:
        found[plan.approximate_positions] = Reading.MOVED.value
        if repaired is not None:
            found[repaired] = Reading.REPAIRED.value
    ends = np.flatnonzero(np.diff(found)) + 1
    return tuple(Part(Reading(int(found[a])), a, b) for a, b in pairwise([0, *ends.tolist(), tokens]))
