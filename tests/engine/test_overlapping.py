"""Calls that overlap have one plan, which leaves room for what the others save; held against brute force."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal.core.plan import Plan
from shoal.core.schedule import schedule
from shoal.core.step import RESIDENT, StepGraph
from shoal.engine.overlapping import plan_overlapping, waiting_bytes
from shoal.errors import BudgetError
from shoal.planners.joint import joint
from shoal.planners.keep_all import keep_all
from tests.random_steps import HARDWARE, resnet_like, steps


def peak_of(calls: int, plan: Plan, graph: StepGraph) -> int:
    """Bytes in use at the worst moment of `calls` forward passes and then, in reverse, their backward passes, counted
    op by op without anything of Shoal's but the schedule of one call."""
    storages, runs = graph.storages, schedule(graph, plan.residences)
    n_forward = graph.n_forward
    shared = graph.static_bytes + sum(s.nbytes for s in storages if s.kind in ("parameter", "buffer", "constant"))
    own_input = sum(s.nbytes for s in storages if s.kind in RESIDENT) + graph.static_bytes - shared
    gradient = sum(s.nbytes for s in storages if s.kind == "gradient")
    alive: list[set[int]] = [set() for _ in range(calls)]
    highest = 0
    order = [(call, True) for call in range(calls)] + [(call, False) for call in reversed(range(calls))]
    done = 0
    for call, forward in order:
        for run in runs[:n_forward] if forward else runs[n_forward:]:
            alive[call].update(run.writes)
            if run.takes_over >= 0:
                alive[call].discard(run.takes_over)
            op = run.of(graph)
            dropped = sum(storages[s].nbytes for s in op.writes if s not in run.writes) if run.again else 0
            in_use = sum(storages[s].nbytes for held in alive for s in held) + dropped + op.workspace_bytes
            in_use += shared + own_input * calls + gradient * (done > 0)
            highest = max(highest, in_use)
            alive[call].difference_update(run.frees)
        if not forward:
            alive[call].clear()
            done += 1
    return highest


def planned(calls: int, graph: StepGraph, budget_bytes: int) -> Plan:
    def make(aside_bytes: int) -> Plan:
        seen = replace(graph, static_bytes=graph.static_bytes + aside_bytes)
        return (joint if budget_bytes else keep_all)(seen, HARDWARE, budget_bytes)

    assume(any(op.phase == "loss" for op in graph.ops))

    return plan_overlapping(calls, budget_bytes, make)[1]


@given(steps(), st.integers(2, 4))
def test_what_is_predicted_for_calls_that_overlap_covers_them(graph: StepGraph, calls: int) -> None:
    plan = planned(calls, graph, 0)
    assert plan.predicted_peak_bytes >= peak_of(calls, plan, graph)


@settings(max_examples=settings().max_examples // 3)
@given(steps(), st.integers(2, 3), st.floats(0.5, 1.0))
def test_they_are_inside_the_budget_or_refused_with_one_that_works(graph: StepGraph, calls: int, share: float) -> None:
    budget_bytes = int(share * planned(calls, graph, 0).predicted_peak_bytes)
    try:
        plan = planned(calls, graph, budget_bytes)
    except BudgetError as refused:
        assert refused.least_feasible_bytes is not None
        budget_bytes = refused.least_feasible_bytes
        try:
            plan = planned(calls, graph, budget_bytes)
        except BudgetError as again:  # what one call needs was named; now it is known what all need
            assert again.least_feasible_bytes is not None and again.least_feasible_bytes > budget_bytes
            budget_bytes = again.least_feasible_bytes
            plan = planned(calls, graph, budget_bytes)
    assert max(plan.predicted_peak_bytes, peak_of(calls, plan, graph)) <= budget_bytes


def test_one_call_is_planned_as_ever() -> None:
    graph = resnet_like((1, 1))
    budget_bytes = int(0.7 * keep_all(graph, HARDWARE, 0).predicted_peak_bytes)
    assert planned(1, graph, budget_bytes) == joint(graph, HARDWARE, budget_bytes)


def test_a_larger_step_that_may_wait_counts_in_a_smaller_ones_plan() -> None:
    small, large = resnet_like((1, 1), scale=1 << 10), resnet_like((1, 1), scale=1 << 12)
    waiting = keep_all(large, HARDWARE, 0)

    def make(aside_bytes: int) -> Plan:
        return keep_all(replace(small, static_bytes=aside_bytes), HARDWARE, 0)

    aside_bytes, plan = plan_overlapping(2, 0, make, [waiting])
    assert aside_bytes == 0
    assert plan.graph.static_bytes == waiting_bytes(waiting) > waiting_bytes(make(0))


def test_budgets_of_calls_that_overlap_are_used() -> None:
    graph = resnet_like((1, 1))
    budget_bytes = int(0.6 * planned(2, graph, 0).predicted_peak_bytes)
    plan = planned(2, graph, budget_bytes)
    assert plan.recomputed
    assert plan.predicted_peak_bytes >= 0.8 * budget_bytes
