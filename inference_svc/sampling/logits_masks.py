"""Logits masks: masks of grammars, allowed tokens and early ends, and logit bias, for all rows at once."""

from __future__ import annotations

from math import inf

import numpy as np
import torch
from kvsidecar.errors import GenerationFailed
from torch import Tensor

from inference_svc.sampling.sampling_state import SamplingState


def apply_masks(scores: Tensor, samplers: list[SamplingState], vocabulary: int) -> dict[int, GenerationFailed]:
    """Masks tokens that are not allowed, in ``scores [rows, padded vocabulary]``.

    Returns the errors of rows whose grammar failed; all tokens of such a row are masked.
    """
    device, lost = scores.device, {}
    steered, masks = [], []
    for i, s in enumerate(samplers):
        if s.grammar is not None:
            try:
                masks.append(s.grammar.mask())
                steered.append(i)
            except GenerationFailed as error:
                scores[i].fill_(-inf)
                lost[i] = error
    if masks:
        # The masks are copied to the device as bits, which are an eighth of the bytes, and unpacked there.
        packed = torch.from_numpy(np.stack(masks)).to(device)
        bits = packed[:, :, None].bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=device)).bitwise_and_(1)
        for i, denied in zip(steered, (bits == 0).view(len(masks), -1), strict=True):
            scores[i, :vocabulary].masked_fill_(denied[:vocabulary], -inf)
    for i, s in enumerate(samplers):
        if s.params.allowed_tokens is not None:
            kept = s.params.allowed_ids.to(device)
            values = scores[i, kept]
            scores[i].fill_(-inf)
            scores[i, kept] = values
        early = [token for token in s.too_early if token < vocabulary]
        if early:
            ends = torch.tensor(early, device=device)
            values = scores[i, ends]
            scores[i, ends] = -inf
            if not torch.isfinite(scores[i].amax()):  # no other token is allowed: the grammar is complete
                scores[i, ends] = values
    return lost


def apply_logit_bias(scores: Tensor, samplers: list[SamplingState]) -> None:
    """Adds the biases of each row to ``scores [rows, padded vocabulary]``."""
    biased = [(i, *s.params.biases) for i, s in enumerate(samplers) if s.params.logit_bias]
    if biased:
        rows = torch.cat([torch.full_like(ids, i) for i, ids, _ in biased])
        ids, biases = torch.cat([ids for _, ids, _ in biased]), torch.cat([biases for _, _, biases in biased])
        scores.index_put_((rows.to(scores.device), ids.to(scores.device)), biases.to(scores.device), accumulate=True)
