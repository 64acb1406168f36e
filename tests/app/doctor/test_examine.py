"""How far the gradients of two steps are apart, in one number that means something."""

from __future__ import annotations

import math

import torch

from shoal.app.doctor.examine import largest_difference

NAN = math.nan


def named(**values: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([1.0, value]) for name, value in values.items()}


def test_a_gradient_that_is_rounding_alone_is_measured_by_the_others() -> None:
    assert (
        largest_difference(
            {"weight": torch.tensor([2.0]), "bias": torch.tensor([-1e-9])},
            {"weight": torch.tensor([2.0]), "bias": torch.tensor([1e-9])},
        )
        < 1e-8
    )


def test_what_is_nan_in_both_is_equal_and_in_one_is_not() -> None:
    assert largest_difference(named(weight=NAN), named(weight=NAN)) == 0
    assert largest_difference(named(weight=NAN), named(weight=1.0)) == math.inf
    assert largest_difference(named(weight=1.0), named(weight=NAN)) == math.inf


def test_a_parameter_with_a_gradient_in_one_alone_is_as_far_as_can_be() -> None:
    assert largest_difference(named(weight=1.0), named(weight=1.0, bias=1.0)) == math.inf


def test_where_all_are_zero_anything_else_is_as_far_as_can_be() -> None:
    zero, one = {"weight": torch.zeros(2)}, {"weight": torch.ones(2)}
    assert (largest_difference(zero, zero), largest_difference(one, zero)) == (0, math.inf)
