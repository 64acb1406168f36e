"""The plans of a status are those that its steps run by, and each counts what the loop holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.engine.loop_memory import Basis, LoopMemory
from shoal.engine.plans_in_force import PlansInForce
from shoal.engine.status import Status
from tests.random_steps import conv_bn_relu_chain


@dataclass(eq=False)
class Step:
    """As much of a metered step as plans need."""

    plan: Plan | None = None
    basis: Basis | None = None
    steps_to_meter: int = 0


def planned(graph: StepGraph, seconds: float = 0.0) -> tuple[Any, Plan, Basis]:
    outputs = dict(enumerate(s.name for s in graph.storages if s.kind == "output"))
    return (
        Step(),
        Plan(graph, {}, "none", "cpu", 0, planning_seconds=seconds),
        Basis(graph, None, outputs, "captured"),
    )


def test_a_plan_replaces_that_of_the_same_step_alone() -> None:
    status = Status(0)
    plans = PlansInForce(status)
    first, again, other = (
        planned(conv_bn_relu_chain(3), 1),
        planned(conv_bn_relu_chain(3), 2),
        planned(conv_bn_relu_chain(4), 4),
    )
    for one in (first, other, again):
        plans.put(*one)
    assert [plan.planning_seconds for plan in status.plans] == [4, 2] and status.planning_seconds == 7
    assert plans.have([first[0], other[0]]) and not plans.have([first[0], Step()])  # type: ignore[list-item]


def test_what_the_loop_holds_counts_in_every_plan_and_tells_where_one_passes_the_budget() -> None:
    step, plan, basis = planned(conv_bn_relu_chain(3))
    status = Status(None)
    plans = PlansInForce(status)
    plans.put(step, plan, basis)
    loop = LoopMemory(held_result_bytes=0)
    assert not plans.adapt(loop)  # there is no budget
    before_bytes = status.plans[0].predicted_peak_bytes
    status = replace(status, budget_bytes=before_bytes + 99)
    plans = PlansInForce(status)
    plans.put(step, status.plans[0], basis)
    assert not plans.adapt(loop)
    plans.count(100)
    assert plans.adapt(loop)
    assert status.plans == (step.plan,)
    assert step.plan.predicted_peak_bytes == before_bytes + 100


def test_a_step_that_was_planned_since_does_not_run() -> None:
    status = Status(0)
    plans = PlansInForce(status)
    first, since = planned(conv_bn_relu_chain(3)), planned(conv_bn_relu_chain(4))
    since[0].steps_to_meter = 1
    plans.put(*first)
    before = status.plans
    plans.put(*since)
    assert plans.any_is_to_be_metered()
    plans.go_back_to(before)
    assert status.plans == before and not plans.any_is_to_be_metered() and not plans.have([since[0]])
    plans.end()
    assert status.plans == () and not plans.have([first[0]])


def test_the_last_plan_is_shown_until_the_next_is_made() -> None:
    status = Status(None)
    plans = PlansInForce(status)
    first, again = planned(conv_bn_relu_chain(3)), planned(conv_bn_relu_chain(4))
    plans.put(*first)
    status.measured_peak_bytes = 5
    for _ in range(2):  # what ends twice has ended
        plans.end()
        assert status.plan is first[1] and status.measured_peak_bytes == 5
        assert status.predicted_peak_bytes == first[1].predicted_peak_bytes
        assert status.metrics()["shoal/plans"] == 0 and "predicted peak" in str(status)
    plans.put(*again)
    assert status.plan is again[1] and status.measured_peak_bytes is None
    assert status.predicted_peak_bytes == again[1].predicted_peak_bytes
