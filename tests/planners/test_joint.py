"""The joint planner: inside the budget, near its bound, never slower than the planners it knows."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.check import check
from shoal.errors import BudgetError
from shoal.hardware import Device, Hardware, Link
from shoal.planners.chain import chain
from shoal.planners.drop_again import drop_again
from shoal.planners.integer_program import solve
from shoal.planners.joint import joint
from shoal.planners.just_in_time import just_in_time
from shoal.planners.keep_all import keep_all
from shoal.planners.recompute_choice import recompute_choice
from shoal.planners.sqrt import sqrt
from shoal.schedule import schedule
from shoal.simulate import peak_and_seconds
from shoal.step import StepGraph
from tests.random_steps import conv_bn_relu_chain, densenet_like, resnet_like, steps, unet_like, unhurried

HERE = Hardware("here", Device("cpu", 1 << 34, 1e11, 1e10, 1e-6), Link("none", 1e10, 1e10, 1e-6), "made up")


def plain_peak_bytes(graph: StepGraph) -> int:
    return keep_all(graph, HERE, 0).predicted_peak_bytes


@unhurried
@given(steps(), st.floats(0.3, 1.0))
def test_every_plan_is_inside_its_budget_and_passes_the_independent_check(graph: StepGraph, share: float) -> None:
    budget_bytes = int(share * plain_peak_bytes(graph))
    try:
        plan = joint(graph, HERE, budget_bytes)
    except BudgetError as error:
        assert error.least_feasible_bytes > budget_bytes
        return
    assert check(graph, plan.residences, schedule(graph, plan.residences), budget_bytes) == plan.predicted_peak_bytes
    assert plan.predicted_peak_bytes <= budget_bytes


@unhurried
@given(steps(), st.floats(0.4, 1.0))
def test_the_lower_bound_is_below_every_plan_there_is(graph: StepGraph, share: float) -> None:
    budget_bytes = int(share * plain_peak_bytes(graph))
    for planner in (joint, chain, sqrt):
        try:
            added_seconds = planner(graph, HERE, budget_bytes).added_seconds
        except BudgetError:
            continue
        bound = solve(recompute_choice(graph), budget_bytes, early=False, time_limit_seconds=5)
        assert bound.bound_seconds <= added_seconds * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("share", [0.9, 0.7, 0.55, 0.45])
def test_it_equals_brute_force_over_all_sets_to_keep_on_a_small_chain(share: float) -> None:
    graph = conv_bn_relu_chain(4)
    choice = recompute_choice(graph)
    budget_bytes = int(share * plain_peak_bytes(graph))
    best = None
    for kept in itertools.product((False, True), repeat=len(choice.candidates)):
        chosen = {s for s, keep in zip(choice.candidates, kept, strict=True) if keep}
        peak_bytes, seconds = peak_and_seconds(graph, schedule(graph, just_in_time(graph, choice.kept_for(chosen))))
        if peak_bytes <= budget_bytes and (best is None or seconds < best):
            best = seconds
    try:
        planned = joint(graph, HERE, budget_bytes).predicted_seconds
    except BudgetError:
        assert best is None
        return
    assert best is None or planned <= best * 1.003


@pytest.mark.parametrize("build", [conv_bn_relu_chain, resnet_like, densenet_like, unet_like])
@pytest.mark.parametrize("share", [0.8, 0.6, 0.45])
def test_it_is_never_slower_than_the_chain_planner(build: object, share: float) -> None:
    graph = build(8) if build is conv_bn_relu_chain else build()  # type: ignore[operator]
    budget_bytes = int(share * plain_peak_bytes(graph))
    try:
        theirs = chain(graph, HERE, budget_bytes).added_seconds
    except BudgetError:
        return
    ours = joint(graph, HERE, budget_bytes)
    tolerance_seconds = 0.003 * ours.plain_seconds
    assert ours.added_seconds <= theirs + tolerance_seconds


def test_what_fits_as_it_is_stays_as_it_is() -> None:
    graph = resnet_like()
    plan = joint(graph, HERE, plain_peak_bytes(graph))
    assert not plan.recomputed
    assert plan.added_seconds == 0
    assert plan.lower_bound_seconds == 0


def test_a_budget_below_the_least_is_refused_with_that_least_and_what_fills_it() -> None:
    graph = resnet_like()
    with pytest.raises(BudgetError, match="no plan of .* fits") as refused:
        joint(graph, HERE, graph.resident_bytes + 1)
    least_bytes = refused.value.least_feasible_bytes
    assert refused.value.op and refused.value.largest
    assert joint(graph, HERE, least_bytes).predicted_peak_bytes <= least_bytes


@unhurried
@given(steps())
def test_dropping_again_lowers_the_peak_and_stays_a_valid_plan(graph: StepGraph) -> None:
    start = just_in_time(graph, [])
    peak_bytes, _ = peak_and_seconds(graph, schedule(graph, start))
    lower = drop_again(graph, start, int(0.95 * peak_bytes))
    if lower is not None:
        assert check(graph, lower, schedule(graph, lower)) <= int(0.95 * peak_bytes)
