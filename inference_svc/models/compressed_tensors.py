"""Translates compressed-tensors' ``pack-quantized`` 4-bit weights into AutoAWQ's parts.

A linear layer has ``weight_packed`` int32 ``[out, in / 8]``, ``weight_scale [out, groups]`` and ``weight_shape`` (out,
in). It also has ``weight_zero_point`` int32 ``[out / 8, groups]``, unless all zeros are 0. Nibble i of a word is the
word's i-th number plus 8. A word of weights has the numbers of consecutive inputs; a word of zeros has those of
consecutive outputs (``compressed_tensors.compressors.pack_quantized``). So both have AWQ's numbers from 0 to 15, in
another order.
"""

from __future__ import annotations

from typing import Any

import torch
from kvkernels.awq_layout import pack_columns
from kvsidecar.errors import ModelUnsupported
from torch import Tensor

METHOD = "compressed-tensors"
PACKED, SCALE, ZEROS, SHAPE, ORDER = (f"weight_{part}" for part in ("packed", "scale", "zero_point", "shape", "g_idx"))
_MIDDLE = 8  # the code of zero


def check(settings: dict[str, Any]) -> None:
    """Raise ModelUnsupported unless the quantization is 4-bit integers in groups.

    All quantized weights must have this format, and nothing else may be quantized.
    """
    groups = settings.get("config_groups") or {}
    schemes = list(groups.values()) if isinstance(groups, dict) else [groups]
    if not all(isinstance(one, dict) and isinstance(one.get("weights") or {}, dict) for one in schemes):
        raise ModelUnsupported(f"quantization_config of {METHOD} has config_groups that describe no weights")
    wanted: list[tuple[str, object, object]] = [("format", "pack-quantized", settings.get("format"))]
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        wanted.append((name, None, settings.get(name) or None))
    for scheme in schemes:
        weights = scheme.get("weights") or {}
        wanted += [
            ("format", "pack-quantized", scheme.get("format") or "pack-quantized"),
            ("num_bits", 4, weights.get("num_bits")),
            ("type", "int", weights.get("type", "int")),
            ("strategy", "group", weights.get("strategy")),
            ("actorder", None, weights.get("actorder") or None),
            ("input_activations", None, scheme.get("input_activations")),
            ("output_activations", None, scheme.get("output_activations")),
        ]
    for name, allowed, given in wanted:
        if given != allowed:
            raise ModelUnsupported(
                f"quantization_config of {METHOD} says {name} {given!r}; allowed is {name} {allowed!r}: integers of 4 "
                "bits in groups of inputs, packed"
            )


def awq_parts(packed: Tensor, scales: Tensor, zeros: Tensor | None, shape: Tensor) -> list[Tensor]:
    """Build ``qweight``, ``qzeros`` and ``scales`` of a linear layer.

    Raises ValueError if the parts do not fit.
    """
    if shape.shape != (2,) or scales.dim() != 2:
        raise ValueError(f"{SHAPE} has {list(shape.shape)} numbers and {SCALE} {scales.dim()} dimensions; both are 2")
    wrong = [one.dtype for one in (packed, zeros) if one is not None and one.dtype != torch.int32]
    if wrong or not scales.is_floating_point():
        raise ValueError(f"its numbers are {wrong or [scales.dtype]}; packed ones are int32, scales floating")
    outputs, inputs = (int(n) for n in shape)
    groups = scales.shape[1]
    fit = scales.shape == (outputs, groups) and packed.shape == (outputs, -(-inputs // 8))
    fit &= zeros is None or zeros.shape == (-(-outputs // 8), groups)
    if not fit or groups == 0 or inputs % groups or outputs % 8:
        raise ValueError(
            f"a weight of {outputs} x {inputs} comes with {PACKED} {list(packed.shape)}, {SCALE} {list(scales.shape)}"
            + ("" if zeros is None else f" and {ZEROS} {list(zeros.shape)}")
        )
    codes = _nibbles(packed)[:, :inputs]
    middle = torch.full((groups, outputs), _MIDDLE, dtype=torch.uint8)
    found = middle if zeros is None else _nibbles(zeros.t())[:, :outputs]
    return [pack_columns(codes.t()), pack_columns(found), scales.t().contiguous()]


def _nibbles(words: Tensor) -> Tensor:
    """Unpack int32 words into nibbles ``[rows, 8 * words]``, in order."""
    return (words[..., None] >> torch.arange(0, 32, 4) & 15).to(torch.uint8).flatten(-2)
