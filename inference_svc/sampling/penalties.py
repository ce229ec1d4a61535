"""Repetition, frequency and presence penalties of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_svc.sampling.sampling_params import SamplingParams


class TokenCounts:
    """Distinct tokens of prompt and answer, with their counts in the answer."""

    def __init__(self, prompt: Iterable[int]) -> None:
        known = np.unique(np.fromiter(prompt, np.int64))
        self._at = {int(token): i for i, token in enumerate(known)}
        self._ids, self._generated = known, np.zeros(len(known), np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        """The distinct tokens ``[n]``."""
        return self._ids[: len(self._at)]

    @property
    def generated(self) -> NDArray[np.float32]:
        """Counts ``[n]`` of the tokens in the answer."""
        return self._generated[: len(self._at)]

    def copy(self) -> TokenCounts:
        other = TokenCounts(())
        other._at, other._ids, other._generated = dict(self._at), self._ids.copy(), self._generated.copy()
        return other

    def add(self, token: int) -> None:
        at = self._at.setdefault(token, len(self._at))
        if at == len(self._ids):
            room = max(16, at)
            self._ids = np.concatenate((self._ids, np.zeros(room, np.int64)))
            self._generated = np.concatenate((self._generated, np.zeros(room, np.float32)))
        self._ids[at] = token
        self._generated[at] += 1


def apply_penalties(scores: Tensor, rows: Sequence[tuple[SamplingParams, TokenCounts | None]]) -> None:
    """Applies the penalties of each row to ``scores [rows, padded vocabulary]``.

    ``rows`` have the parameters and counts of each row; a row without penalties has no counts.
    """
    device = scores.device
    counted = [(i, params, counts) for i, (params, counts) in enumerate(rows) if counts is not None and len(counts.ids)]
    if not counted:
        return
    lengths = [len(c.ids) for _, _, c in counted]

    def each(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, np.float32), lengths)).to(device)

    at = torch.from_numpy(np.repeat(np.asarray([i for i, _, _ in counted]), lengths)).to(device)
    ids = torch.from_numpy(np.concatenate([c.ids for _, _, c in counted])).to(device)
    times = torch.from_numpy(np.concatenate([c.generated for _, _, c in counted])).to(device)
    repetition = each([p.repetition_penalty for _, p, _ in counted])
    values = scores[at, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= each([p.frequency_penalty for _, p, _ in counted]) * times
    values -= each([p.presence_penalty for _, p, _ in counted]) * (times > 0)
    scores[at, ids] = values
