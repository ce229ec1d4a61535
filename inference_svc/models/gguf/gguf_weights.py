"""GGUF weights under transformers' names, unpacked piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, dequantize, get_tensor_name_map
from kvkernels.cpu.quantized_gemm import OUTPUTS
from kvsidecar.errors import ModelUnsupported
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from inference_svc.models.gguf import gguf_codes
from inference_svc.models.gguf.gguf_config import ROPE_TENSORS
from inference_svc.models.gguf.gguf_file import GgufFile, TensorInfo
from inference_svc.models.safetensors_writer import TensorSpec

# Elements that are unpacked at once: 16 MiB of float32.
_PIECE_ELEMENTS = 1 << 22
_ONE_ADDED = ("gemma2", "gemma3")  # llama.cpp adds one to the weights of their norms
_PAIRED = ("llama",)  # llama.cpp rotates pairs of adjacent channels, transformers pairs that are half a head apart


@dataclass(frozen=True)
class GgufWeight:
    """One weight of a model, and its tensor in the file."""

    name: str
    shape: tuple[int, ...]
    source: TensorInfo
    heads: int = 0  # number of heads whose rows must be reordered from llama.cpp's order; 0: none
    less: float = 0.0  # constant to subtract from the stored values
    linear: bool = False  # the weight of a linear layer

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def coded(self) -> bool:
        """True if the CPU kernel computes with the file's quantization codes, without dequantizing the weight."""
        return self.linear and gguf_codes.is_coded(self.source.kind, self.shape)

    def spec(self, dtype: torch.dtype, coded: bool) -> TensorSpec:
        """Tensor of the weight in a converted folder."""
        if not (coded and self.coded):
            return TensorSpec(self.name, dtype, self.shape)
        name = f"{self.name.removesuffix('weight')}codes{gguf_codes.CODED[self.source.kind].bits}"
        return TensorSpec(name, torch.uint8, gguf_codes.stored_shape(self.source.kind, self.shape))

    def pieces(self, file: GgufFile, dtype: torch.dtype, coded: bool = False) -> Iterator[Tensor]:
        """Yield the weight as consecutive flat tensors: values in ``dtype``, or the bytes of its codes."""
        for rows in self._rows(file):
            if coded and self.coded:
                yield gguf_codes.pack_rows(rows, self.source.kind).data.view(-1)
                continue
            values = np.array(dequantize(rows, self.source.kind), np.float32)
            if self.heads and len(self.shape) == 1:  # a bias has one channel per row of the weight
                values = values.reshape(-1)[row_order(self.shape[0], self.heads)]
            if self.less:
                values -= np.float32(self.less)
            yield torch.from_numpy(values).to(dtype).reshape(-1)

    def _rows(self, file: GgufFile) -> Iterator[NDArray[np.uint8]]:
        """Yield the packed rows in transformers' order. Each piece is a multiple of the kernel's strips."""
        packed = file.packed(self.source)
        # Rows are reordered before they are unpacked: fewer bytes move, and the whole tensor need not be in memory.
        order = row_order(len(packed), self.heads) if self.heads and len(self.shape) > 1 else None
        step = max(1, _PIECE_ELEMENTS // self.shape[-1] // OUTPUTS) * OUTPUTS
        for at in range(0, len(packed), step):
            yield np.ascontiguousarray(packed[at : at + step] if order is None else packed[order[at : at + step]])


def row_order(rows: int, heads: int) -> NDArray[np.int64]:
    """Returns, for each row of a rotary projection in transformers' order, the row's index in llama.cpp's order."""
    half = rows // heads // 2
    return np.arange(rows).reshape(heads, half, 2).swapaxes(1, 2).reshape(-1)


def weights_of(file: GgufFile, config: Any) -> list[GgufWeight]:
    """List the weights of the model that ``config`` describes.

    Raises ModelUnsupported if the file lacks a weight, has a weight of another shape, or has an unexpected tensor.
    """
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
        linear = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear)
        out.append(_weight(file, config, name, source, linear and name.endswith(".weight")))
    left = sorted(file.tensors.keys() - used)
    if left:
        raise ModelUnsupported(
            f"{file.path} holds {len(left)} tensors that its model has no place for, the first is {left[0]}"
        )
    return out


def _weight(file: GgufFile, config: Any, name: str, source: TensorInfo, linear: bool) -> GgufWeight:
    heads = 0
    if file.architecture in _PAIRED and ".q_proj." in name:
        heads = int(config.num_attention_heads)
    elif file.architecture in _PAIRED and ".k_proj." in name:
        heads = int(config.num_key_value_heads)
    less = 1.0 if file.architecture in _ONE_ADDED and name.endswith("norm.weight") else 0.0
    return GgufWeight(name, source.shape, source, heads, less, linear)


def _arch(file: GgufFile) -> MODEL_ARCH:
    return next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
