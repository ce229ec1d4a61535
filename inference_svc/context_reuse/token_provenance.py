"""Token provenance: origin of a prompt's keys and values, for requests with ``explain``."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from inference_svc.context_reuse.reuse_plan import Positions, ReusePlan


class Provenance(enum.Enum):
    """Origin of keys and values; see ``kvsidecar.inference.v1.Reading``."""

    EXACT = 1
    RELOCATED = 2
    RECOMPUTED = 3
    COMPUTED = 4


@dataclass(frozen=True)
class ProvenanceSpan:
    """Tokens ``start`` to ``end`` of a prompt, all with the same provenance."""

    provenance: Provenance
    start: int
    end: int


def provenance_spans(
    tokens: int, exact: int, plan: ReusePlan | None, repaired: Positions | None
) -> tuple[ProvenanceSpan, ...]:
    """Split a prompt of ``tokens`` tokens into spans of equal provenance.

    The first ``exact`` tokens were reused exactly. The approximate tokens of ``plan`` are relocated, except the
    recomputed ones at ``repaired``.
    """
    found = np.full(tokens, Provenance.COMPUTED.value, np.uint8)
    found[:exact] = Provenance.EXACT.value
    if plan is not None:
        found[plan.approximate_positions] = Provenance.RELOCATED.value
        if repaired is not None:
            found[repaired] = Provenance.RECOMPUTED.value
    ends = np.flatnonzero(np.diff(found)) + 1
    return tuple(ProvenanceSpan(Provenance(int(found[a])), a, b) for a, b in pairwise([0, *ends.tolist(), tokens]))
