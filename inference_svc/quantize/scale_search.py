"""AWQ's scale search: scales up the weights of important inputs before rounding.

The inputs are scaled down accordingly. A layer ``y = W x`` equals ``(W s) (x / s)`` for any positive input scale ``s``,
but their rounded forms differ: an input that is scaled up is rounded finer, at the expense of others in its group. The
paper uses ``s = mean(|x|) ** ratio`` and searches the ratio. AutoAWQ, and therefore this module, divides this scale by
``size ** (1 - ratio)``, where ``size`` is the relative magnitude of the weights in their groups. The search also tries
the scale 1, so that the error is never larger than that of plain rounding.

The error is that of the layer's outputs, ``mean((dW x) ** 2)`` over the text, which is ``dW G dW^T`` for ``G = mean(x
x^T)``. This form is exact for any number of tokens, and its cost does not depend on that number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inference_svc.quantize.awq_rounding import fake_quantize

# Number of exponents in [0, 1) to try, as AutoAWQ does.
_STEPS = 20
# Smallest share to which a group's range is shrunk, and the number of steps.
_MIN_RANGE_SHARE, _CLIP_STEPS = 0.5, 10


@dataclass(frozen=True)
class InputStats:
    """Input statistics of a layer.

    ``magnitude [in]`` is the mean of ``|x|``, and ``products [in, in]`` the mean of ``x x^T``.
    """

    magnitude: Tensor
    products: Tensor


@dataclass(frozen=True)
class ScaleResult:
    """Input scale ``[in]``, and the output errors with this scale and with plain rounding.

    Errors are shares of the outputs' mean square, summed over the layers.
    """

    values: Tensor
    error: float
    plain_error: float


def output_error(change: Tensor, products: Tensor) -> Tensor:
    """Mean squared error of each output ``[out]`` for a change ``[out, in]`` of a layer's weight."""
    return ((change @ products) * change).sum(1)


def best_scale(weights: Sequence[Tensor], inputs: InputStats, group: int) -> ScaleResult:
    """Search the best scale for layers ``[out, in]`` with common inputs."""
    sizes = [float(output_error(w, inputs.products).sum().clamp_min(1e-20)) for w in weights]

    def error(scale: Tensor) -> float:
        changes = (fake_quantize(w * scale, group).div_(scale).sub_(w) for w in weights)
        return sum(float(output_error(c, inputs.products).sum()) / size for c, size in zip(changes, sizes, strict=True))

    best = torch.ones_like(inputs.magnitude)
    least = plain = error(best)
    for scale in _candidates(weights, inputs.magnitude, group):
        found = error(scale)
        if found < least:
            best, least = scale, found
    return ScaleResult(best, least, plain)


def _candidates(weights: Sequence[Tensor], magnitude: Tensor, group: int) -> Iterator[Tensor]:
    # Relative magnitude of an input's weights within their groups, averaged over the outputs of all layers.
    total = torch.zeros_like(magnitude)
    for weight in weights:
        groups = weight.abs().view(len(weight), -1, group)
        total += (groups / (groups.amax(-1, keepdim=True) + 1e-6)).sum(0).flatten()
    size = total / sum(len(w) for w in weights)
    for step in range(_STEPS):
        ratio = step / _STEPS
        scale = (magnitude**ratio / (size ** (1 - ratio) + 1e-4)).clamp_min_(1e-4)
        yield scale / (scale.max() * scale.min()).sqrt()


def best_shrink(weight: Tensor, products: Tensor, group: int) -> Tensor:
    """Search the shrink factors ``[out, groups]`` of the groups' ranges of a weight ``[out, in]``.

    Clipping a few large weights allows finer rounding of the others. No output's error increases.
    """
    outputs, groups = weight.shape[0], weight.shape[1] // group
    # Each group is searched alone; the products between groups are ignored.
    blocks = torch.stack([products[g : g + group, g : g + group] for g in range(0, len(products), group)])
    shrink, least = torch.ones(outputs, groups), torch.full((outputs, groups), torch.inf)
    for step in range(_CLIP_STEPS):
        tried = torch.full_like(shrink, 1 - step * (1 - _MIN_RANGE_SHARE) / _CLIP_STEPS)
        change = (fake_quantize(weight, group, tried) - weight).view(outputs, groups, group).transpose(0, 1)
        found = ((change @ blocks) * change).sum(-1).t()
        shrink, least = torch.where(found < least, tried, shrink), least.minimum(found)
    # Here the products between groups count: accept the factors of all of an output's groups, or none.
    errors = [output_error(fake_quantize(weight, group, s) - weight, products) for s in (shrink, None)]
    return torch.where((errors[0] <= errors[1])[:, None], shrink, 1.0)
