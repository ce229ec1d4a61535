"""When entries are used again: what was seen, by kind and age, and what it promises."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

AGES = 64
_HALF_LIFE = 2 * AGES  # slices until an observation counts half
_PRIOR_USES = 16.0  # what a pool's rate weighs against a kind's own, in uses

_Floats = NDArray[np.float64]


class ReuseStats:
    """Follows entries from use to use. Ages are counted in slices of time; the last age is open at its end.

    The rate of uses at an age is ``uses / time at risk``, as in a life table, so that entries that nobody waited for
    long enough (the young ones, and those that were lost sight of) count for as long as they were seen. Old
    observations fade. A kind of which little was seen is taken to be like the kinds it is ``pooled`` with.
    """

    def __init__(self, pooled: Sequence[Sequence[int]], prior: _Floats) -> None:
        """``pooled``: from coarse to fine, for each kind the number of the pool that it is in. ``guess``: uses per
        slice ``[kinds, AGES]``, above 0, for a start."""
        shape = prior.shape
        self._pools = [np.eye(max(level) + 1)[:, list(level)] for level in pooled]  # [pools, kinds]
        self._prior = prior
        self.waiting = np.zeros(shape)  # entries whose last use is so old, now
        self._recent = np.zeros(shape)  # uses in this slice of time
        # The same memory: single elements are read and written faster through these.
        self._one_waiting, self._one_recent = memoryview(self.waiting), memoryview(self._recent)  # type: ignore[arg-type]
        self._uses, self._risk = np.zeros(shape), np.zeros(shape)

    def start_wait(self, kind: int, age: int = 0) -> None:
        """An entry of this kind was used ``age`` ago, and is waited for."""
        self._one_waiting[kind, age] += 1

    def drop_wait(self, kind: int, age: int) -> None:
        """Such an entry is waited for no longer."""
        self._one_waiting[kind, age] -= 1

    def record_reuse(self, kind: int, age: int) -> None:
        """Such an entry was used; the next wait is to be begun."""
        self._one_waiting[kind, age] -= 1
        self._one_recent[kind, age] += 1

    def advance_slice(self) -> None:
        """A slice of time went by."""
        kept = 0.5 ** (1 / _HALF_LIFE)
        self._uses = (self._uses + self._recent) * kept
        self._risk = (self._risk + self.waiting + self._recent / 2) * kept
        self._recent[:] = 0
        oldest = self.waiting[:, -2:].sum(axis=1)
        self.waiting[:, 1:] = self.waiting[:, :-1].copy()
        self.waiting[:, 0], self.waiting[:, -1] = 0, oldest

    def double_slice(self) -> None:
        """Slices become twice as long. Nobody waits then: waits are to be begun anew."""
        self.waiting[:] = 0
        self._recent[:], self._uses, self._risk = (
            np.concatenate([x[:, ::2] + x[:, 1::2], np.zeros((len(x), AGES // 2))], axis=1)
            for x in (self._recent, self._uses, self._risk / 2)
        )

    def gittins_index(self) -> _Floats:
        """The Gittins index ``[kinds, AGES]``: the most uses per slice in the tier that an entry can bring if it is
        kept from this age on, and given up at the best later one."""
        rates = self._rates()
        chance = np.minimum(1.0, rates / (1 + rates / 2))  # of a use at this age
        alive = np.cumprod(1 - chance, axis=1)
        before = np.concatenate([np.ones((len(alive), 1)), alive[:, :-1]], axis=1)
        uses = np.cumsum(before * chance, axis=1)
        time = np.cumsum(before * (1 - chance / 2), axis=1)
        # The open age goes on until the use.
        uses[:, -1] = 1.0
        time[:, -1] = time[:, -2] + before[:, -1] / chance[:, -1]
        out = np.empty_like(uses)
        used, passed = np.zeros((len(out), 1)), np.zeros((len(out), 1))
        for age in range(AGES):
            out[:, age] = ((uses[:, age:] - used) / np.maximum(time[:, age:] - passed, 1e-12)).max(axis=1)
            used, passed = uses[:, age : age + 1], time[:, age : age + 1]
        return out

    def _rates(self) -> _Floats:
        rates = self._prior
        for pools in self._pools:
            uses, risk = pools @ self._uses, pools @ self._risk
            rates = (pools.T @ uses + _PRIOR_USES) / (pools.T @ risk + _PRIOR_USES / rates)
        return rates
