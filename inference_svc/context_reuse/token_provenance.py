"""How each part of a prompt came about: for whoever asks what was reused."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan


class Provenance(enum.Enum):
    """How keys and values came about; see ``kvsidecar.inference.v1.Reading``."""

    EXACT = 1
    RELOCATED = 2
    RECOMPUTED = 3
    COMPUTED = 4


@dataclass(frozen=True)
class ProvenanceSpan:
    """Tokens ``start`` to ``end`` of a prompt."""

    provenance: Provenance
    start: int
    end: int


def provenance_spans(
    tokens: int, exact: int, plan: ReusePlan | None, repaired: Positions | None
) -> tuple[ProvenanceSpan, ...]:
    """All of a prompt of ``tokens`` in order, neighbours different: ``exact`` leading tokens were read before, and with
    a ``plan`` its approximate ones, of which those at ``repaired`` were computed again."""
    found = np.full(tokens, Provenance.COMPUTED.value, np.uint8)
    found[:exact] = Provenance.EXACT.value
    if plan is not None:
        found[plan.approximate_positions] = Provenance.RELOCATED.value
        if repaired is not None:
            found[repaired] = Provenance.RECOMPUTED.value
    ends = np.flatnonzero(np.diff(found)) + 1
    return tuple(ProvenanceSpan(Provenance(int(found[a])), a, b) for a, b in pairwise([0, *ends.tolist(), tokens]))
