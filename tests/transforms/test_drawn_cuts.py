"""Cuts drawn for every mini-batch: where they lie, where they come from, and how a compiled step takes them."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal import models
from shoal.transforms.drawn_cuts import as_sizes, draw, from_sizes, limits
from shoal.transforms.split import split
from shoal.transforms.split_plan import SplitPlan


def plan_of(parts: int, stride: int) -> SplitPlan:
    plan = split(nn.Sequential(nn.Conv2d(1, 1, 3, stride, 1)), 1.0, (parts, 1), stochastic=0.2).plan
    assert plan is not None
    return plan


lengths, parts, omegas, strides = st.integers(12, 40), st.integers(2, 4), st.floats(0.0, 0.49), st.sampled_from([1, 2])


@given(lengths, parts, omegas, strides)
def test_cuts_lie_within_omega_of_the_even_ones_and_leave_no_patch_empty(
    length: int, parts: int, omega: float, stride: int
) -> None:
    (cuts, none) = draw(plan_of(parts, stride), (length, 5), omega)
    assert none == ()
    ends = [0, *cuts, -(-length // stride)]
    assert all(a < b for a, b in pairwise(ends))
    for i, cut in enumerate(cuts, 1):
        assert abs(stride * cut - i * length / parts) <= omega * length / parts + stride


@given(lengths, parts, omegas, strides)
def test_limits_are_reached_and_never_passed(length: int, parts: int, omega: float, stride: int) -> None:
    plan = plan_of(parts, stride)
    (least, _), (most, _) = limits(plan, (length, 5), omega)
    drawn = [draw(plan, (length, 5), omega)[0] for _ in range(200)]
    assert all(low <= cut <= high for cuts in drawn for low, cut, high in zip(least, cuts, most, strict=True))
    if most[0] - least[0] <= 4:
        assert {min(cuts[0] for cuts in drawn), max(cuts[0] for cuts in drawn)} == {least[0], most[0]}


@given(lengths, parts, omegas, strides)
def test_a_compiled_step_gets_the_cuts_that_were_drawn(length: int, parts: int, omega: float, stride: int) -> None:
    plan = plan_of(parts, stride)
    cuts, (least, most) = draw(plan, (length, 5), omega), limits(plan, (length, 5), omega)
    carriers = as_sizes(cuts, least, most)
    assert from_sizes(carriers) == cuts
    assert all(one[0].numel() == 0 for along in carriers for one in along if not isinstance(one, int))


def test_draws_come_from_torchs_generator_and_so_resume() -> None:
    plan = split(models.build("vgg19_cifar", seed=0), 0.5, stochastic=0.2).plan
    assert plan is not None
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = [draw(plan, (32, 32), 0.2) for _ in range(20)]
    torch.set_rng_state(state)
    assert [draw(plan, (32, 32), 0.2) for _ in range(20)] == first
    assert len(set(first)) > 1
