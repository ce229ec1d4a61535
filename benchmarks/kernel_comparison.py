"""Comparison of kernels with a reference and a bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from benchmarks import report

Implementation = Callable[[], Any]


class KernelComparison:
    """Rows of measured kernels.

    ``bandwidth`` (bytes/s) and ``products`` (operations/s) are the device's measured limits.
    """

    def __init__(
        self, repeats: int, times_us: Callable[[Implementation, int], list[float]], bandwidth: float, products: float
    ) -> None:
        """``times_us(call, repeats)`` returns the times of a call, after warming up."""
        self.repeats, self.rows, self._times_us = repeats, list[dict[str, Any]](), times_us
        self.bandwidth, self.products = bandwidth, products

    def add(
        self,
        op: str,
        shape: str,
        ours: Implementation,
        name: str,
        theirs: Implementation,
        bytes_moved: float,
        operations: float = 0.0,
    ) -> None:
        """Run and compare both. ``bytes_moved`` and ``operations`` give the bound."""
        got, expected = _tensor(ours()).float(), _tensor(theirs()).float()
        error = float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-9))
        ours_times, reference_times = (self._times_us(way, self.repeats) for way in (ours, theirs))
        ours_us, reference_us = report.median(ours_times), report.median(reference_times)
        bound = max(bytes_moved / self.bandwidth, operations / self.products) * 1e6
        self.rows.append(
            {
                "op": op,
                "shape": shape,
                **report.figure(ours_times, "ours_us", "ours"),
                "reference": name,
                **report.figure(reference_times, "reference_us", "reference"),
                "bound_us": round(bound, 2),
                "max_rel_error": round(error, 6),
                "over_reference": round(reference_us / ours_us, 3),
                "of_bound": round(bound / ours_us, 3),
            }
        )

    def summary(self) -> dict[str, float]:
        """Return the device's limits and the largest error."""
        return {
            "copy_gb_per_s": round(self.bandwidth / 1e9, 1),
            "product_tflops": round(self.products / 1e12, 3),
            "max_rel_error": max(row["max_rel_error"] for row in self.rows),
        }


def _tensor(found: Any) -> Tensor:
    out = found[0] if isinstance(found, tuple) else found
    assert isinstance(out, Tensor)
    return out
