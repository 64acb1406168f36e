"""Plans of steps that the host launches op by op: no plan is faster than the bound, with or without copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.hardware import Device, Hardware, Link
from shoal.core.residence import Offload
from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.errors import BudgetError
from shoal.planners.estimates import least_seconds
from shoal.planners.integer_program import add_launch_rows, lower_bound, solve
from shoal.planners.joint import joint
from shoal.planners.just_in_time import just_in_time
from shoal.planners.limits import DEFAULT, Guard
from shoal.planners.linear_program import LinearProgram
from shoal.planners.recompute_choice import recompute_choice
from shoal.planners.transfer_places import TransferPlaces, placed_residences
from tests.random_steps import launches, offloads, plain_chain, resnet_like, steps

HERE = Hardware("here", Device("gpu", 1 << 34, 1e11, 1e10, 1e-6), Link("none", 1e10, 1e10, 1e-6), "made up")
links = st.builds(
    Link,
    st.just("link"),
    st.sampled_from([1.0, 5.0, 40.0, 1000.0]),
    st.sampled_from([1.0, 5.0, 40.0, 1000.0]),
    st.sampled_from([0.0, 0.25, 2.0]),
    overlaps=st.booleans(),
)


def bound_seconds(graph: StepGraph, budget_bytes: int, *, whole: bool) -> float:
    """Of the whole step."""
    found = lower_bound(graph, budget_bytes, DEFAULT, Guard(600.0), whole=whole)
    return graph.plain_seconds + found.bound_seconds


@given(st.data())
def test_no_plan_that_recomputes_is_faster_than_the_bound(data: st.DataObject) -> None:
    graph = data.draw(launches(data.draw(steps())))
    stays = data.draw(st.sets(st.sampled_from(range(len(graph.storages)))))
    peak_bytes, seconds = peak_and_seconds(graph, schedule(graph, just_in_time(graph, stays)))
    for whole in (False, True):
        assert bound_seconds(graph, peak_bytes, whole=whole) <= seconds * (1 + 1e-6)
    assert least_seconds(graph, peak_bytes) <= seconds * (1 + 1e-6)


@given(st.data())
def test_no_plan_that_offloads_is_faster_than_the_bound(data: st.DataObject) -> None:
    graph = replace(data.draw(launches(data.draw(steps(max_ops=6)))), link=data.draw(links))
    residences = data.draw(offloads(graph))
    peak_bytes, seconds = peak_and_seconds(graph, schedule(graph, residences))
    for whole in (False, True):
        assert bound_seconds(graph, peak_bytes, whole=whole) <= seconds * (1 + 1e-6)


@given(st.data())
def test_where_copies_are_placed_the_step_takes_no_longer_than_said(data: st.DataObject) -> None:
    graph = replace(data.draw(launches(data.draw(steps()))), link=data.draw(links))
    stays = data.draw(st.sets(st.sampled_from(range(len(graph.storages)))))
    kept = just_in_time(graph, stays)
    budget_bytes = data.draw(st.sampled_from([0, 100, 200]))
    places = TransferPlaces(graph, kept, budget_bytes)
    _, plain = peak_and_seconds(graph, schedule(graph, kept))
    assert places.seconds == pytest.approx(plain)
    able = [s for s in sorted(stays) if places.can_leave(s)]
    away = data.draw(st.sets(st.sampled_from(able))) if able else set()
    placed = places.place(away)
    _, seconds = peak_and_seconds(graph, schedule(graph, placed_residences(graph, kept, placed)))
    assert plain <= seconds * (1 + 1e-9) <= placed.seconds * (1 + 2e-9)


@given(st.data())
def test_a_plan_is_inside_the_budget_and_no_faster_than_its_own_bound(data: st.DataObject) -> None:
    graph = data.draw(launches(data.draw(steps(max_ops=6))))
    if data.draw(st.booleans()):
        graph = replace(graph, link=data.draw(links))
    most_bytes, _ = peak_and_seconds(graph, schedule(graph, {}))
    budget_bytes = int(data.draw(st.sampled_from([0.95, 0.8, 0.65])) * most_bytes)
    try:
        plan = joint(graph, HERE, budget_bytes)
    except BudgetError as refused:
        assert refused.least_feasible_bytes > budget_bytes
        return
    runs = schedule(plan.graph, plan.residences)
    assert check_runs(plan.graph, plan.residences, runs, budget_bytes) <= budget_bytes
    assert plan.lower_bound_seconds <= plan.added_seconds + 1e-6 * plan.plain_seconds


def test_a_step_that_the_host_holds_up_is_planned_for_few_launches() -> None:
    """Of two storages of one size, the one that is made again by a long kernel and a short launch is given up."""
    graph = plain_chain(6)
    of_launch, of_device = graph.ops[1], graph.ops[2]
    ops = list(graph.ops)
    ops[1] = replace(of_launch, launch_seconds=50.0, seconds=0.1)
    ops[2] = replace(of_device, launch_seconds=10.0, seconds=9.0)
    ops = [op if op.id in (1, 2) else replace(op, launch_seconds=40.0) for op in ops]
    launched, device_bound = replace(graph, ops=tuple(ops)), replace(graph, ops=tuple(ops)).without_launches()
    most_bytes, _ = peak_and_seconds(graph, schedule(graph, {}))
    given_up = [
        {storage.name for storage in joint(one, HERE, most_bytes - 1000).recomputed} for one in (launched, device_bound)
    ]
    assert "conv_2.out" in given_up[0]
    assert "conv_1.out" in given_up[1]


def test_launches_that_hide_behind_long_ops_leave_the_plan_as_it_is() -> None:
    graph = resnet_like((1, 1, 1, 1))
    launched = replace(graph, ops=tuple(replace(op, launch_seconds=1e-4) for op in graph.ops))
    most_bytes, _ = peak_and_seconds(graph, schedule(graph, {}))
    plans = [joint(one, HERE, int(0.7 * most_bytes)) for one in (graph, launched)]
    assert plans[0].residences == plans[1].residences
    assert plans[1].predicted_seconds == pytest.approx(plans[0].predicted_seconds + 1e-4)
    assert plans[1].lower_bound_seconds == pytest.approx(plans[0].lower_bound_seconds, rel=1e-3, abs=1e-3)


def test_an_offloading_plan_of_a_launched_step_is_legal() -> None:
    graph = plain_chain(6)
    launched = replace(graph, ops=tuple(replace(op, launch_seconds=3.0) for op in graph.ops))
    launched = replace(launched, link=Link("link", 1000.0, 1000.0, 0.0))
    most_bytes, _ = peak_and_seconds(graph, schedule(graph, {}))
    plan = joint(launched, HERE, most_bytes - 1500)
    assert any(isinstance(one, Offload) for one in plan.residences.values())
    assert plan.added_seconds == pytest.approx(0.0)  # the device waits for the host anyway


def test_a_step_without_launches_gets_no_row() -> None:
    graph = plain_chain(4)
    program = LinearProgram()
    before = program.entries, program.objective
    assert add_launch_rows(program, graph, {}) == 0.0
    assert (program.entries, program.objective) == before
    solved = [solve(recompute_choice(one), 3500) for one in (graph, graph.without_launches())]
    assert solved[0] == solved[1]
