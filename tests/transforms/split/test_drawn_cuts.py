"""Cuts drawn for every mini-batch: where they lie, where they come from, and how a compiled step takes them."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from examples import networks as models
from shoal.errors import InputError
from shoal.transforms.split.drawn_cuts import as_sizes, draw, from_sizes, limits
from shoal.transforms.split.split import split
from shoal.transforms.split.split_plan import SplitPlan
from tests.raising import raising


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
    joined = ends[-1]
    for i, cut in enumerate(cuts, 1):  # the paper's interval of the joined tensor, or the even cut if it is empty
        assert abs(cut - i * joined / parts) <= omega * joined / parts or cut == i * joined // parts


@pytest.mark.parametrize("rows, strides, expected", [(32, (1, 2), range(7, 10)), (224, (2, 2, 2, 2), range(6, 9))])
def test_each_row_of_the_papers_interval_is_drawn_as_often_as_any_other(
    rows: int, strides: tuple[int, ...], expected: range
) -> None:
    plan = split(nn.Sequential(*(nn.Conv2d(1, 1, 3, s, 1) for s in strides)), 1.0, (2, 1), stochastic=0.2).plan
    assert plan is not None
    torch.manual_seed(0)
    drawn = Counter(draw(plan, (rows, rows), 0.2)[0][0] for _ in range(3000))
    assert sorted(drawn) == list(expected)
    assert max(drawn.values()) < 1.15 * min(drawn.values())  # about 1000 each, at a fixed seed


def test_that_nothing_is_drawn_is_logged_once_for_each_size(caplog: pytest.LogCaptureFixture) -> None:
    divided = split(nn.Sequential(nn.Conv2d(1, 1, 3, 1, 1)), 1.0, stochastic=0.2)
    for rows in (8, 8, 16):
        divided(torch.randn(2, 1, rows, rows))
        divided.draw(torch.randn(2, 1, rows, rows))
    assert [record.getMessage() for record in caplog.records] == [
        "stochastic=0.2 draws nothing: at the join of 8 x 8 rows only the even cuts are within omega; give a smaller "
        "depth or a greater omega"
    ]


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
    plan = split(models.build("vgg19_cifar", seed=0), 0.25, stochastic=0.2).plan
    assert plan is not None
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = [draw(plan, (32, 32), 0.2) for _ in range(20)]
    torch.set_rng_state(state)
    assert [draw(plan, (32, 32), 0.2) for _ in range(20)] == first
    assert len(set(first)) > 1


def test_draws_leave_mirroring_layers_enough_rows() -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 3, 1, 1), nn.Conv2d(1, 1, 7, 1, 3, padding_mode="reflect"))
    divided = split(net, 1.0, (3, 1), stochastic=0.45)
    assert divided.plan is not None
    drawn = {draw(divided.plan, (12, 5), 0.45)[0] for _ in range(200)}
    assert min(first for first, _ in drawn) == 4 and max(second for _, second in drawn) == 8
    assert {second - first for first, second in drawn} == {2, 3, 4}
    for _ in range(20):
        divided(torch.randn(1, 1, 12, 5))
    told = divided.describe((12, 5)).splitlines()[-1]
    assert told == ("cuts of dim 0 are drawn from 4 to 5, 7 to 8 of the join, where its patches need 4, 1, 4 rows")


@pytest.mark.parametrize("grid", [(3, 1), (3, 2), (2, 4)])
def test_draws_leave_batch_norms_of_one_image_two_elements(grid: tuple[int, int]) -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 3, 1, 1), nn.BatchNorm2d(1))
    divided = split(net, 1.0, grid, stochastic=0.45)
    for _ in range(50):
        assert divided(torch.randn(1, 1, 7, 5)).shape == (1, 1, 7, 5)
    frozen = split(net, 1.0, (5, 5), stochastic=0.45)
    with raising(InputError, "5 x 5"):
        frozen(torch.randn(1, 1, 5, 5))
    assert frozen(torch.randn(2, 1, 5, 5)).shape == (2, 1, 5, 5)
    net[1].eval()
    assert frozen(torch.randn(1, 1, 5, 5)).shape == (1, 1, 5, 5)
