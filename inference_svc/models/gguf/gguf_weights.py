"""A GGUF file's weights under transformers' names, unpacked a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, dequantize, get_tensor_name_map
from kvsidecar.errors import ModelUnsupported
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from inference_svc.models.gguf.gguf_config import ROPE_TENSORS
from inference_svc.models.gguf.gguf_file import GgufFile, TensorInfo

# Elements that are unpacked at once: 16 MiB of float32.
_PIECE_ELEMENTS = 1 << 22
_ONE_ADDED = ("gemma2", "gemma3")  # llama.cpp stores the weights of their norms plus one
_PAIRED = ("llama",)  # llama.cpp turns neighbouring channels of their heads, transformers channels half a head apart


@dataclass(frozen=True)
class GgufWeight:
    """One weight of a model, and where it comes from."""

    name: str
    shape: tuple[int, ...]
    source: TensorInfo
    heads: int = 0  # whose rows must be taken out of llama.cpp's order; none when 0
    less: float = 0.0  # what must be subtracted

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def pieces(self, file: GgufFile, dtype: torch.dtype) -> Iterator[Tensor]:
        """The weight as flat tensors, one after the other."""
        packed = file.packed(self.source)
        # Rows are put in order before they are unpacked: that moves a quarter of the bytes, and needs no whole tensor.
        order = row_order(len(packed), self.heads) if self.heads and len(self.shape) > 1 else None
        step = max(1, _PIECE_ELEMENTS // self.shape[-1])
        for at in range(0, len(packed), step):
            rows = packed[at : at + step] if order is None else packed[order[at : at + step]]
            values = np.array(dequantize(np.ascontiguousarray(rows), self.source.kind), np.float32)
            if self.heads and len(self.shape) == 1:  # a bias: its channels are in the order of rows
                values = values.reshape(-1)[row_order(self.shape[0], self.heads)]
            if self.less:
                values -= np.float32(self.less)
            yield torch.from_numpy(values).to(dtype).reshape(-1)


def row_order(rows: int, heads: int) -> NDArray[np.int64]:
    """Where in llama.cpp's order each of transformers' rows of a rotated projection is."""
    half = rows // heads // 2
    return np.arange(rows).reshape(heads, half, 2).swapaxes(1, 2).reshape(-1)


def weights_of(file: GgufFile, config: Any) -> list[GgufWeight]:
    """All weights of the model that ``config`` describes. Raises ModelUnsupported when the file lacks one, has one of
    another shape, or holds what nobody asked for."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = get_tensor_name_map(_arch(file), int(config.num_hidden_layers))
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    out, used = [], set(ROPE_TENSORS)
    for name, parameter in model.state_dict().items():
        if name in tied:
            continue
        theirs = names.get_name(key=name, try_suffixes=(".weight", ".bias"))
        source = file.tensors.get(theirs or "")
        if source is None:
            raise ModelUnsupported(f"{file.path} lacks {theirs or name}, which its model needs")
        if source.shape != tuple(parameter.shape):
            raise ModelUnsupported(
                f"{file.path} has {theirs} in the shape {list(source.shape)}; its model needs {list(parameter.shape)}"
            )
        used.add(source.name)
        out.append(_weight(file, config, name, source))
    left = sorted(file.tensors.keys() - used)
    if left:
        raise ModelUnsupported(
            f"{file.path} holds {len(left)} tensors that its model has no place for, the first is {left[0]}"
        )
    return out


def _weight(file: GgufFile, config: Any, name: str, source: TensorInfo) -> GgufWeight:
    heads = 0
    if file.architecture in _PAIRED and ".q_proj." in name:
        heads = int(config.num_attention_heads)
    elif file.architecture in _PAIRED and ".k_proj." in name:
        heads = int(config.num_key_value_heads)
    less = 1.0 if file.architecture in _ONE_ADDED and name.endswith("norm.weight") else 0.0
    return GgufWeight(name, source.shape, source, heads, less)


def _arch(file: GgufFile) -> MODEL_ARCH:
    return next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
