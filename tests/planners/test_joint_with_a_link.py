"""The joint planner where the host is a residence too: legal, inside both budgets, never above a plan it knows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from examples.planners.hascoet import hascoet
from examples.planners.hmms import hmms
from examples.planners.layerwise import layerwise
from shoal.core.hardware import Device, Hardware, Link
from shoal.core.residence import Offload, Residence
from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.errors import BudgetError
from shoal.planners import smallest_plan
from shoal.planners.integer_program import solve
from shoal.planners.joint import joint
from shoal.planners.just_in_time import just_in_time
from shoal.planners.keep_all import keep_all
from shoal.planners.limits import DEFAULT, Guard, Limits
from shoal.planners.recompute_choice import recompute_choice
from shoal.planners.simulated import Simulated, everything_away
from tests.random_steps import Builder, legal_offloads, resnet_like, steps

HERE = Hardware("here", Device("cpu", 1 << 34, 1e11, 1e10, 1e-6), Link("none", 1e10, 1e10, 1e-6), "made up")
MAX_PLANS = 1500

links = st.builds(
    Link,
    st.just("link"),
    st.sampled_from([1.0, 5.0, 40.0, 1000.0]),
    st.sampled_from([1.0, 5.0, 40.0, 1000.0]),
    st.sampled_from([0.0, 0.25, 2.0]),
    host_bytes=st.sampled_from([0, 0, 2 * 4096]),
    overlaps=st.booleans(),
)


def every_plan(graph: StepGraph) -> Iterator[dict[str, Residence]]:
    """Every plan that keeps, recomputes as late as possible, or offloads from and to any legal place."""
    forward = [s.id for s in graph.storages if s.kind == "activation" and graph.producer[s.id] < graph.n_forward]
    for n in range(len(forward) + 1):
        for stays in itertools.combinations(forward, n):
            kept = just_in_time(graph, stays)
            leave = list(legal_offloads(graph, kept, stays))
            places = [[None, *itertools.product(ends, starts)] for _, ends, starts in leave]
            for chosen in itertools.product(*places):
                away = {
                    name: Offload(place[0].name, place[1].name)
                    for (name, _, _), place in zip(leave, chosen, strict=True)
                    if place is not None
                }
                yield {**kept, **away}


def least_seconds(graph: StepGraph, budget_bytes: int) -> float:
    """The fastest plan inside the budget by trying all; the example is thrown away where there are too many."""
    plans = list(itertools.islice(every_plan(graph), MAX_PLANS + 1))
    assume(len(plans) <= MAX_PLANS)
    limit = graph.link.host_bytes if graph.link else 0
    fastest = float("inf")
    for plan in plans:
        host_bytes = sum(s.host_bytes for s in graph.storages if isinstance(plan.get(s.name), Offload))
        if limit and host_bytes > limit:
            continue
        peak_bytes, seconds = peak_and_seconds(graph, schedule(graph, plan))
        if peak_bytes <= budget_bytes:
            fastest = min(fastest, seconds)
    return fastest


@given(steps(max_ops=5), links, st.floats(0.3, 1.0))
def test_the_lower_bound_is_below_every_plan_of_the_three_residences(
    graph: StepGraph, link: Link, share: float
) -> None:
    graph = replace(graph, link=link)
    plain = keep_all(graph, HERE, 0)
    budget_bytes = int(share * plain.predicted_peak_bytes)
    fastest = least_seconds(graph, budget_bytes)
    bound = solve(recompute_choice(graph, every=True), budget_bytes, early=False)
    if fastest < float("inf"):
        assert bound.bound_seconds <= fastest - plain.predicted_seconds + 1e-6


@given(steps(max_ops=7), links, st.floats(0.3, 1.0))
def test_its_plan_is_legal_inside_both_budgets_and_never_above_what_the_papers_planners_find(
    graph: StepGraph, link: Link, share: float
) -> None:
    graph = replace(graph, link=link)
    budget_bytes = int(share * keep_all(graph, HERE, 0).predicted_peak_bytes)
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
    assert not link.host_bytes or plan.host_bytes <= link.host_bytes
    assert plan.lower_bound_seconds <= plan.added_seconds + 1e-6
    for planner in (hmms, layerwise, hascoet):
        try:
            theirs = planner(graph, HERE, budget_bytes).predicted_seconds
        except BudgetError:
            continue
        assert plan.predicted_seconds <= theirs * 1.0021 + 1e-9


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_a_link_faster_than_the_device_saves_all_recomputation(share: float) -> None:
    graph = replace(resnet_like((1, 2, 2, 1)), link=Link("fast", 1e15, 1e15, 0.0))
    budget_bytes = int(share * keep_all(graph, HERE, 0).predicted_peak_bytes)
    plan = joint(graph, HERE, budget_bytes)
    assert plan.offloaded and not plan.recomputed
    assert plan.added_seconds == pytest.approx(0.0, abs=0.002 * plan.plain_seconds)


def test_a_link_too_slow_to_carry_anything_changes_nothing() -> None:
    alone = resnet_like((1, 2, 2, 1))
    budget_bytes = int(0.7 * keep_all(alone, HERE, 0).predicted_peak_bytes)
    without = joint(alone, HERE, budget_bytes)
    plan = joint(replace(alone, link=Link("slow", 1.0, 1.0, 0.0)), HERE, budget_bytes)
    assert not plan.offloaded
    assert plan.added_seconds <= without.added_seconds + 0.002 * plan.plain_seconds


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_the_least_that_is_named_uses_the_room_that_the_host_has(share: float) -> None:
    graph = resnet_like((1, 2, 2, 1))
    graph = replace(graph, ops=tuple(replace(op, recomputable=False) for op in graph.ops))
    all_host_bytes = sum(graph.storages[s].host_bytes for s in everything_away(recompute_choice(graph)).offloaded)
    graph = replace(graph, link=Link("link", 1e15, 1e15, 0.0, host_bytes=int(share * all_host_bytes)))
    with pytest.raises(BudgetError) as refused:
        joint(graph, HERE, 1)
    least_bytes = refused.value.least_feasible_bytes
    assert least_bytes is not None
    plan = joint(graph, HERE, least_bytes)
    assert 0 < plan.host_bytes <= share * all_host_bytes
    assert keep_all(graph, HERE, 0).predicted_peak_bytes - least_bytes > 0.5 * plan.host_bytes
    with pytest.raises(BudgetError):
        joint(graph, HERE, int(0.8 * least_bytes))


@pytest.mark.parametrize("recomputable", [True, False])
def test_the_least_that_fits_is_no_more_with_a_link_than_without(recomputable: bool) -> None:
    b = Builder()
    x = b.input(10)
    for _ in range(6):
        x = b.conv_bn_relu(x, 20)
    step = b.step(x)
    alone = replace(step, ops=tuple(replace(op, recomputable=recomputable) for op in step.ops))
    least = {}
    for name, link in (("without", None), ("with", Link("link", 100.0, 100.0, 0.0))):
        with pytest.raises(BudgetError) as refused:
            joint(replace(alone, link=link), HERE, alone.resident_bytes + 1)
        least[name] = refused.value.least_feasible_bytes
    assert least["with"] <= least["without"]
    assert recomputable or least["with"] < least["without"]  # what cannot be recomputed can leave


def test_the_smallest_plan_is_ordered_again_from_its_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    step = resnet_like((1, 1), scale=8)
    alone = smallest_plan.smallest_plan(step, HERE, 1, DEFAULT)
    assert alone.captured_order  # found in another order than captured
    given: list[Simulated] = []

    def in_lower_order(found: Simulated, limits: Limits, guard: Guard) -> None:
        given.append(found)

    monkeypatch.setattr(smallest_plan, "in_lower_order", in_lower_order)
    monkeypatch.setattr(
        smallest_plan,
        "_smallest_with_link",
        lambda graph, *_: replace(alone, graph=replace(alone.graph, link=graph.link)),
    )
    smallest_plan._smallest.cache_clear()
    linked = replace(step, link=Link("too small", 1.0, 1.0, 0.0, host_bytes=1))
    least = smallest_plan._smallest(linked, HERE, 1, DEFAULT)
    smallest_plan._smallest.cache_clear()
    assert [found.peak_bytes for found in given] == [alone.predicted_peak_bytes] == [least.predicted_peak_bytes]


def test_what_comes_back_from_the_host_is_read_in_an_order_in_which_it_goes_soon_again() -> None:
    b = Builder(gradients_apart=True)
    x = b.relu(b.conv(b.input(10), 80))
    joined = b.add(b.conv(b.relu(b.conv(x, 10)), 80), b.conv(x, 80))  # two weight gradients read x
    step = replace(b.step(b.conv(joined, 1)), link=Link("link", 100.0, 100.0, 0.0))
    guard, chosen = Guard(DEFAULT.guard_seconds), everything_away(recompute_choice(step))
    away = smallest_plan._with_copies(step, chosen, HERE).residences
    ordered = smallest_plan.in_order_for_copies(step, away, DEFAULT, guard)
    assert ordered is not None and sorted(op.name for op in ordered.ops) == sorted(op.name for op in step.ops)
    plans = [smallest_plan._with_copies(graph, chosen, HERE) for graph in (step, ordered)]
    before, after = (plan.predicted_peak_bytes for plan in plans)
    assert after < before
    for plan in plans:
        peak_bytes = check_runs(plan.graph, plan.residences, schedule(plan.graph, plan.residences))
        assert peak_bytes == plan.predicted_peak_bytes
    assert smallest_plan.in_order_for_copies(step, away, replace(DEFAULT, order=False), guard) is None
    assert smallest_plan.in_order_for_copies(ordered, plans[1].residences, DEFAULT, guard) is None  # it cannot be lower
    least = smallest_plan._smallest_with_link(step, HERE, 1 << 40, replace(DEFAULT, local_search=False), guard)
    assert least.predicted_peak_bytes <= after
