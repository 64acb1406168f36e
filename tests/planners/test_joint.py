"""The joint planner: inside the budget, near its bound, never slower than the planners it knows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from examples.planners.sqrt import sqrt
from shoal.core.hardware import Device, Hardware, Link
from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.cost.roofline import roofline
from shoal.errors import BudgetError
from shoal.planners import joint as joint_module
from shoal.planners.chain import chain, smallest_peak
from shoal.planners.estimates import least_peak_bytes
from shoal.planners.infeasible import fewest_bytes
from shoal.planners.integer_program import relaxed_choices, solve
from shoal.planners.joint import joint
from shoal.planners.just_in_time import just_in_time
from shoal.planners.keep_all import keep_all
from shoal.planners.limits import Guard, Limits
from shoal.planners.local_search import local_search
from shoal.planners.recompute_choice import recompute_choice
from shoal.planners.simulated import as_chosen
from shoal.planners.smallest_plan import refuse_in_a_moment
from tests.joint_graphs import captured_step
from tests.random_steps import conv_bn_relu_chain, densenet_like, resnet_like, steps, unet_like

HERE = Hardware("here", Device("cpu", 1 << 34, 1e11, 1e10, 1e-6), Link("none", 1e10, 1e10, 1e-6), "made up")


def plain_peak_bytes(graph: StepGraph) -> int:
    return keep_all(graph, HERE, 0).predicted_peak_bytes


@given(steps(), st.floats(0.3, 1.0))
def test_every_plan_is_inside_its_budget_and_passes_the_independent_check(graph: StepGraph, share: float) -> None:
    budget_bytes = int(share * plain_peak_bytes(graph))
    try:
        plan = joint(graph, HERE, budget_bytes)
    except BudgetError as error:
        assert error.least_feasible_bytes > budget_bytes
        return
    assert (
        check_runs(plan.graph, plan.residences, schedule(plan.graph, plan.residences), budget_bytes)
        == plan.predicted_peak_bytes
    )
    assert plan.predicted_peak_bytes <= budget_bytes


@given(steps(), st.floats(0.4, 1.0))
def test_the_lower_bound_is_below_every_plan_there_is(graph: StepGraph, share: float) -> None:
    budget_bytes = int(share * plain_peak_bytes(graph))
    for planner in (joint, chain, sqrt):
        try:
            plan = planner(graph, HERE, budget_bytes)
        except BudgetError:
            continue
        bound = solve(recompute_choice(plan.graph, every=True), budget_bytes, early=False)
        assert bound.bound_seconds <= plan.added_seconds * (1 + 1e-6) + 1e-9


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


def vgg_stage(n_in: int, n_out: int) -> list[nn.Module]:
    pairs = ((n_in, n_out), (n_out, n_out))
    convolved = [
        (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)) for a, b in pairs
    ]
    return [*(layer for layers in convolved for layer in layers), nn.MaxPool2d(2)]


def test_the_least_of_a_vgg_is_two_of_its_first_activations_and_what_a_pooling_leaves_of_a_third() -> None:
    stages = [layer for n_in, n_out in ((3, 64), (64, 128), (128, 256), (256, 512)) for layer in vgg_stage(n_in, n_out)]
    images = torch.empty(32, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    vgg = nn.Sequential(*stages, nn.Flatten()).to(memory_format=torch.channels_last)
    graph = roofline(captured_step(vgg, images).graph, HERE)
    gradient_bytes = sum(s.nbytes for s in graph.storages if s.kind == "gradient")
    least_bytes = {}
    for order in (False, True):
        with pytest.raises(BudgetError) as refused:
            joint(graph, HERE, graph.resident_bytes + gradient_bytes, limits=Limits(order=order))
        least_bytes[order] = refused.value.least_feasible_bytes
    first_bytes = 32 * 64 * 32 * 32 * 4
    # The convolution's output and its gradient, in addition to the pooling's gradient (a quarter) and its codes (a
    # sixteenth).
    as_captured_bytes = graph.resident_bytes + gradient_bytes + (2 + 5 / 16) * first_bytes
    assert least_bytes[False] == pytest.approx(as_captured_bytes, rel=0.02)
    # The large weight gradients, of small activations, can wait for the end; those gradients are most of the bytes.
    assert graph.resident_bytes + gradient_bytes < least_bytes[True] < 0.85 * least_bytes[False]


@pytest.mark.parametrize("build", [conv_bn_relu_chain, resnet_like, densenet_like, unet_like])
@pytest.mark.parametrize("share", [0.8, 0.5])
def test_it_is_never_slower_than_the_chain_planner(build: object, share: float) -> None:
    sizes = {conv_bn_relu_chain: 8, densenet_like: (2, 3, 2), resnet_like: (1, 2, 2, 1), unet_like: 3}
    graph = build(sizes[build])  # type: ignore[operator,index]
    budget_bytes = int(share * plain_peak_bytes(graph))
    try:
        theirs = chain(graph, HERE, budget_bytes).added_seconds
    except BudgetError:
        return
    ours = joint(graph, HERE, budget_bytes)
    tolerance_seconds = 0.003 * ours.plain_seconds
    assert ours.added_seconds <= theirs + tolerance_seconds


@given(steps())
def test_no_plan_needs_fewer_bytes_than_its_ops_alone(graph: StepGraph) -> None:
    with pytest.raises(BudgetError) as refused:
        joint(graph, HERE, 1)
    fewest = fewest_bytes(graph)
    assert graph.resident_bytes <= fewest <= refused.value.least_feasible_bytes
    assert fewest <= smallest_peak(graph, HERE).predicted_peak_bytes


def test_the_smallest_peak_is_estimated_by_plans_that_recompute_more_than_once() -> None:
    graph = conv_bn_relu_chain(6)
    with pytest.raises(BudgetError) as refused:
        joint(graph, HERE, 1)
    least_bytes = refused.value.least_feasible_bytes
    assert least_bytes <= least_peak_bytes(graph) < 1.01 * least_bytes
    choice = recompute_choice(graph)
    once = solve(choice, None, whole=False).chosen
    assert once is not None and as_chosen(choice, once).peak_bytes > 3 * least_bytes, "by those that do so once"


def test_a_relaxed_program_keeps_all_where_there_is_room_and_chooses_where_the_budget_has_none() -> None:
    graph = resnet_like((1, 2, 1, 1))
    choice, limits = recompute_choice(graph), Limits()
    plain_seconds = sum(op.seconds for op in graph.ops)
    for budget_bytes in (plain_peak_bytes(graph), 1):
        chosen = list(relaxed_choices(choice, budget_bytes, limits, Guard(600)))
        seconds = [as_chosen(choice, one).seconds for one in chosen]
        assert chosen and len(set(chosen)) == len(chosen)
        assert (max(seconds) == pytest.approx(plain_seconds)) == (budget_bytes > 1)


def test_what_fits_as_it_is_stays_as_it_is() -> None:
    graph = resnet_like()
    plan = joint(graph, HERE, plain_peak_bytes(graph))
    assert not plan.recomputed
    assert plan.added_seconds == 0
    assert plan.lower_bound_seconds == 0


def test_a_budget_below_the_least_is_refused_with_that_least_and_what_fills_it() -> None:
    graph = resnet_like((1, 1))
    with pytest.raises(BudgetError) as refused:
        joint(graph, HERE, graph.resident_bytes + 1)
    least_bytes = refused.value.least_feasible_bytes
    assert refused.value.op and refused.value.largest
    assert joint(graph, HERE, least_bytes).predicted_peak_bytes <= least_bytes


@given(steps())
def test_the_budget_that_is_named_in_a_moment_works(graph: StepGraph) -> None:
    with pytest.raises(BudgetError) as refused:
        refuse_in_a_moment(graph, HERE, 1)
    enough_bytes = refused.value.least_feasible_bytes or 0
    assert joint(graph, HERE, enough_bytes).predicted_peak_bytes <= enough_bytes <= plain_peak_bytes(graph)


@given(steps())
def test_dropping_again_lowers_the_peak_and_stays_a_valid_plan(graph: StepGraph) -> None:
    start = just_in_time(graph, [])
    peak_bytes, _ = peak_and_seconds(graph, schedule(graph, start))
    lower = local_search(graph, start, int(0.95 * peak_bytes))
    if lower is not None:
        assert check_runs(graph, lower, schedule(graph, lower)) <= int(0.95 * peak_bytes)


def test_a_plan_that_computes_little_again_is_not_searched_further_in_a_large_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = resnet_like((1, 2, 2, 1))
    searches: list[object] = []
    monkeypatch.setattr(
        "shoal.planners.joint._JointSearch._local_searches", lambda self, choice: searches.append(choice)
    )
    monkeypatch.setattr("shoal.planners.joint.plans_on_demand", lambda *args: pytest.fail("it recomputes little"))
    for large_ops in (0, 10**6):
        searches.clear()
        limits = Limits(integer_program=False, close_enough=0.0, far_off=0.0, large_ops=large_ops)
        plan = joint(graph, HERE, int(0.8 * plain_peak_bytes(graph)), limits=limits)
        assert 0 < plan.added_seconds <= limits.recomputes_little * plan.plain_seconds
        assert bool(searches) == (large_ops > 0)


def test_a_choice_whose_reruns_leave_no_room_is_where_local_search_begins() -> None:
    """The program does not count the scratch of reruns, and with as much set aside nothing fits."""
    graph = resnet_like((1, 2, 2, 1))
    scratch_bytes = max(storage.nbytes for storage in graph.storages)
    ops = (replace(op, workspace_bytes=scratch_bytes * (op.phase == "forward")) for op in graph.ops)
    graph = replace(graph, ops=tuple(ops))
    fewest = fewest_bytes(graph)
    budget_bytes = fewest + (plain_peak_bytes(graph) - fewest) * 15 // 100
    for finds in (False, True):
        limits = Limits(local_search=finds)
        search = joint_module._JointSearch(HERE, budget_bytes, graph.plain_seconds, limits, Guard(limits.guard_seconds))
        found = search._program(recompute_choice(graph))
        assert (found is not None) == finds
    assert found is not None and found.peak_bytes <= budget_bytes and found.seconds < 1.25 * graph.plain_seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    "share, first",
    [(0.3, ["_local_searches"]), (0.35, ["_local_searches", "_program"]), (0.45, ["_program"])],
    ids=["once does not fit", "once is far from the bound", "once is near it"],
)
def test_a_step_of_many_ops_is_searched_locally_before_the_program_where_recomputing_once_is_far_from_the_bound(
    monkeypatch: pytest.MonkeyPatch, share: float, first: list[str]
) -> None:
    graph = unet_like(3)
    budget_bytes = int(share * plain_peak_bytes(graph))
    asked: list[str] = []

    def watch(part: str) -> None:
        made = getattr(joint_module._JointSearch, part)
        watched = lambda self, choice: asked.append(part) or made(self, choice)  # noqa: E731
        monkeypatch.setattr(joint_module._JointSearch, part, watched)

    watch("_program"), watch("_local_searches")
    usual = joint(graph, HERE, budget_bytes, limits=Limits(many_ops=10**6))
    assert asked[0] == "_program"
    asked.clear()
    many = joint(graph, HERE, budget_bytes, limits=Limits(many_ops=0))
    assert asked[: len(first)] == first and ("_program" in asked) == ("_program" in first)
    assert many.predicted_peak_bytes <= budget_bytes
    assert many.predicted_seconds <= 1.01 * usual.predicted_seconds
