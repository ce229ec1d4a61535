"""Embedding that stays in its file: a forward reads only the rows of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inference_svc.models.layer_streaming.layer_file import LayerFile, StoredWeight
from inference_svc.models.layer_streaming.read_ahead import WeightsUnreadable


class StoredEmbedding(nn.Module):
    """Maps token ids ``[1, tokens]`` to ``[1, tokens, width]``, times ``scale``. Raises WeightsUnreadable."""

    def __init__(self, file: LayerFile, stored: StoredWeight, dtype: torch.dtype, scale: float | None) -> None:
        super().__init__()
        self._file, self._stored, self._dtype, self._scale = file, stored, dtype, scale

    def forward(self, ids: Tensor) -> Tensor:
        numbers, places = torch.unique(ids, return_inverse=True)
        kept = getattr(torch, self._stored.form.dtype)  # dtype of the stored rows
        row_bytes = self._stored.form.inputs * kept.itemsize
        try:
            rows = self._file.rows(self._stored, numbers.tolist(), row_bytes)
        except OSError as error:
            raise WeightsUnreadable(f"the embedding could not be read from its file: {error}") from error
        found = torch.from_numpy(rows).view(kept)[places].to(self._dtype)
        return found if self._scale is None else found * torch.tensor(self._scale).to(self._dtype)
