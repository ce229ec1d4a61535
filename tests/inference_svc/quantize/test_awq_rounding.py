"""Rounding to 4 bits and the searches of AWQ: what they promise for any weights and inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvkernels import awq_layout

from inference_svc.quantize.awq_rounding import fake_quantize, quantize_weight
from inference_svc.quantize.scale_search import InputStats, best_scale, best_shrink, output_error

seeds = st.integers(0, 2**31)


def drawn(seed: int, outputs: int = 24, inputs: int = 96) -> tuple[torch.Tensor, InputStats]:
    """A weight, and inputs of which a few are large and some go together, as in language models."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator) * torch.rand(outputs, 1, generator=generator)
    x = torch.randn(200, inputs, generator=generator) * torch.randn(inputs, generator=generator).exp()
    x += torch.randn(200, 1, generator=generator)
    x[:, int(torch.randint(inputs, (1,), generator=generator))] *= 30
    return weight, InputStats(x.abs().mean(0), x.t() @ x / len(x))


@given(seeds, st.sampled_from([32, 96]))
@settings(max_examples=20, deadline=None)
def test_a_scale_is_never_worse_than_plain_rounding_for_the_error_that_it_minimises(seed: int, group: int) -> None:
    weight, inputs = drawn(seed)
    found = best_scale([weight[:8], weight[8:]], inputs, group)
    errors = [
        output_error(fake_quantize(w * found.values, group) / found.values - w, inputs.products).sum()
        / output_error(w, inputs.products).sum()
        for w in (weight[:8], weight[8:])
    ]
    assert found.error == pytest.approx(float(sum(errors)), rel=1e-3)
    assert found.error <= found.plain_error


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_clipping_makes_no_output_worse(seed: int) -> None:
    weight, inputs = drawn(seed)
    shrink = best_shrink(weight, inputs.products, 32)
    before, after = (output_error(fake_quantize(weight, 32, s) - weight, inputs.products) for s in (None, shrink))
    assert bool((after <= before * (1 + 1e-5)).all())
    assert bool((shrink > 0).all())
    assert bool((shrink <= 1).all())


def test_the_error_is_that_of_the_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    change, x = torch.randn(5, 7, generator=generator), torch.randn(50, 7, generator=generator)
    torch.testing.assert_close(output_error(change, x.t() @ x / 50), (x @ change.t()).square().mean(0))


def test_an_input_that_matters_is_rounded_finer() -> None:
    weight, inputs = drawn(3)
    large = int(inputs.magnitude.argmax())
    scale = best_scale([weight], inputs, 32).values
    plain, ours = fake_quantize(weight, 32) - weight, fake_quantize(weight * scale, 32) / scale - weight
    assert ours[:, large].norm() < 0.5 * plain[:, large].norm()


@given(seeds, st.floats(-1.0, 1.0))
@settings(max_examples=30, deadline=None)
def test_weights_are_rounded_to_the_nearest_code_and_zero_stays(seed: int, shift: float) -> None:
    weight, _ = drawn(seed)
    weight += shift  # groups of one sign, too
    weight[0, :5] = 0.0
    found = quantize_weight(weight, 32)
    steps = found.scales.float().repeat_interleave(32, 1)
    # Half a step, and where zero is rounded to a code as much again at the ends of the range.
    assert bool(((found.dense() - weight).abs() <= 1.01 * steps).all())
    assert (found.dense()[0, :5] == 0).all()
    torch.testing.assert_close(found.dense(), fake_quantize(weight, 32), rtol=0, atol=0)


def test_what_is_written_is_read_to_the_bit() -> None:
    found = quantize_weight(drawn(1)[0], 32)
    parts = found.parts()
    assert torch.equal(awq_layout.unpack_columns(parts["qweight"]).t(), found.codes)
    assert torch.equal(awq_layout.unpack_columns(parts["qzeros"]).t(), found.zeros)
    wide = awq_layout.reference_weight(parts["qweight"], parts["qzeros"], parts["scales"].float())
    assert torch.equal(wide, found.dense())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e6])
def test_numbers_that_the_format_cannot_hold_are_refused(bad: float) -> None:
    weight = torch.ones(8, 32)
    weight[3, 4] = bad
    with pytest.raises(ValueError, match="not finite, or too large"):
        quantize_weight(weight, 32)
