"""Reuse statistics by kind and age, and their Gittins index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

AGES = 64
_HALF_LIFE = 2 * AGES  # slices after which an observation counts half
_PRIOR_USES = 16.0  # weight of the pool's rate in a kind's rate

_Floats = NDArray[np.float64]


class ReuseStats:
    """Observes entries from use to use.

    Ages are counted in time slices; the last age is open-ended. The rate of uses at an age is ``uses / time at
    risk``, as in a life table. So censored entries (young entries and dropped entries) count for as long as they were
    observed. Old observations decay. A kind with few observations is assumed to resemble the kinds in its pool.
    """

    def __init__(self, pooled: Sequence[Sequence[int]], prior: _Floats) -> None:
        """Create the statistics; ``pooled`` gives the pool of each kind, from coarse to fine.

        ``prior`` is the assumed number of uses per time slice, ``[kinds, AGES]`` and above 0.
        """
        shape = prior.shape
        self._pools = [np.eye(max(level) + 1)[:, list(level)] for level in pooled]  # [pools, kinds]
        self._prior = prior
        self.waiting = np.zeros(shape)  # entries now, by kind and age of their last use
        self._recent = np.zeros(shape)  # uses in this time slice
        # Views of the same memory: faster for single elements.
        self._one_waiting, self._one_recent = memoryview(self.waiting), memoryview(self._recent)  # type: ignore[arg-type]
        self._uses, self._risk = np.zeros(shape), np.zeros(shape)

    def start_wait(self, kind: int, age: int = 0) -> None:
        """Start waiting for an entry of this kind that was used ``age`` ago."""
        self._one_waiting[kind, age] += 1

    def drop_wait(self, kind: int, age: int) -> None:
        """Stop waiting for an entry of this kind and age."""
        self._one_waiting[kind, age] -= 1

    def record_reuse(self, kind: int, age: int) -> None:
        """Record a use of an entry of this kind and age; call ``start_wait`` for its next use."""
        self._one_waiting[kind, age] -= 1
        self._one_recent[kind, age] += 1

    def advance_slice(self) -> None:
        """Advance by one time slice."""
        kept = 0.5 ** (1 / _HALF_LIFE)
        self._uses = (self._uses + self._recent) * kept
        self._risk = (self._risk + self.waiting + self._recent / 2) * kept
        self._recent[:] = 0
        oldest = self.waiting[:, -2:].sum(axis=1)
        self.waiting[:, 1:] = self.waiting[:, :-1].copy()
        self.waiting[:, 0], self.waiting[:, -1] = 0, oldest

    def double_slice(self) -> None:
        """Double the length of time slices. Drops all waits, which the caller must start again."""
        self.waiting[:] = 0
        self._recent[:], self._uses, self._risk = (
            np.concatenate([x[:, ::2] + x[:, 1::2], np.zeros((len(x), AGES // 2))], axis=1)
            for x in (self._recent, self._uses, self._risk / 2)
        )

    def gittins_index(self) -> _Floats:
        """Return the Gittins index ``[kinds, AGES]``.

        For each age it is the maximal rate of uses per slice in the tier, over all policies that keep the entry from
        this age on and evict it at a fixed later age.
        """
        rates = self._rates()
        chance = np.minimum(1.0, rates / (1 + rates / 2))  # probability of a use at this age
        alive = np.cumprod(1 - chance, axis=1)
        before = np.concatenate([np.ones((len(alive), 1)), alive[:, :-1]], axis=1)
        uses = np.cumsum(before * chance, axis=1)
        time = np.cumsum(before * (1 - chance / 2), axis=1)
        # The last age is open-ended: it lasts until the use.
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
