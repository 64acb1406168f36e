"""Keep everything: what plain PyTorch does."""

from __future__ import annotations

from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.planners.infeasible import infeasible
from shoal.planners.just_in_time import just_in_time


def keep_all(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
    """The plan that gives nothing up. It is the fastest where it fits.

    Args:
        graph: the step.
        hardware: named in the plan.
        budget_bytes: the most device bytes in use at any moment; 0 for no limit.

    Raises:
        BudgetError: it does not fit; other planners may find one that does.
    """
    every = range(len(graph.storages))
    plan = Plan(graph, just_in_time(graph, every), "keep_all", hardware.name, budget_bytes)
    if budget_bytes and plan.predicted_peak_bytes > budget_bytes:
        raise infeasible(plan, budget_bytes)
    return plan
