"""Probes whether a row gets the same bits in every batch, as exact reuse requires.

A worker probes its model's linear layers when it starts; ``python -m inference_svc.models.batch_invariance_probe``
probes common sizes and prints JSON for ``kvsidecar doctor``. The probe does not cover attention: our kernels guarantee
its batch invariance, and tests check it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from typing import get_args

import torch
from torch import Tensor, nn

from inference_svc.models.linear.dense_linear import DenseLinear, pack_linears
from inference_svc.models.linear.packed_linear import PackedLinear
from inference_svc.models.linear.plain_linear import ROW_MULTIPLE, PlainLinear
from inference_svc.models.mkl_determinism import SETTING, make_mkl_deterministic, wanted_setting

# Inputs and outputs of layers in models of 0.1 to 8 billion parameters, and one irregular shape.
COMMON_SHAPES = ((576, 1536), (896, 896), (896, 4864), (4864, 896), (2048, 2048), (320, 328))
_MANY = (64, 200, 512)
Product = nn.Linear | PackedLinear | DenseLinear | PlainLinear


@torch.inference_mode()
def batch_variant_shapes(products: Iterable[Product], many: Iterable[int] = _MANY) -> list[str]:
    """Shapes (``INPUTSxOUTPUTS``) of linears whose results depend on the batch.

    In a batch of ``many`` rows, their first rows get other bits than alone. Only the first linear of each shape is
    probed.
    """
    found = {}
    for product in products:
        shape = f"{product.in_features}x{product.out_features}"
        if shape not in found:
            found[shape] = _is_uneven(product, product.in_features, tuple(many))
    return [shape for shape, bad in found.items() if bad]


def _is_uneven(product: Callable[[Tensor], Tensor], inputs: int, many: tuple[int, ...]) -> bool:
    dtype = torch.bfloat16 if isinstance(product, PackedLinear) else torch.float32
    dtype = getattr(getattr(product, "weight", None), "dtype", dtype)
    x = torch.randn(max(many), inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    alone = product(x[:ROW_MULTIPLE].contiguous())
    return any(not torch.equal(product(x[:rows].contiguous())[:ROW_MULTIPLE], alone) for rows in many)


def packed_linears_of(model: nn.Module) -> list[Product]:
    """Unquantized linear layers of a model."""
    return [module for module in model.modules() if isinstance(module, get_args(Product))]


def _usual(dtype: torch.dtype) -> list[Product]:
    generator = torch.Generator().manual_seed(1)
    layers = nn.ModuleList(nn.Linear(inputs, outputs, bias=False) for inputs, outputs in COMMON_SHAPES)
    for parameter in layers.parameters():
        parameter.data.normal_(0.0, 0.02, generator=generator)
    layers.to(dtype).requires_grad_(False)
    pack_linears(layers)
    return packed_linears_of(layers)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m inference_svc.models.batch_invariance_probe", description=__doc__)
    parser.add_argument("--as-is", action="store_true", help=f"do not set {SETTING}, as a worker would")
    options = parser.parse_args()
    if not options.as_is:
        make_mkl_deterministic()
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    print(
        json.dumps(
            {"setting": wanted_setting(), "uneven": {n: batch_variant_shapes(_usual(d)) for n, d in dtypes.items()}}
        )
    )


if __name__ == "__main__":
    main()
