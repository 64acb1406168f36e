"""States of the random generator that a plan keeps to repeat random ops in the backward pass, counted in its peak."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.residence import Recompute, Residence
from shoal.core.sizes import MAX_BYTES
from shoal.core.step import StepGraph, Storage
from shoal.errors import BudgetError
from shoal.planners import Planner


def counting_states(planner: Planner, each_bytes: int) -> Planner:
    """A planner whose plans have them in their steps' `static_bytes`.

    Args:
        planner: what makes the plans.
        each_bytes: of one state.
    """

    def plan(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        most = _kept(sum(op.random and op.recomputable for op in graph.ops)) if each_bytes else 0
        counted = 0
        while True:
            with_states = replace(graph, static_bytes=graph.static_bytes + counted * each_bytes)
            try:
                made = planner(with_states, hardware, budget_bytes)
            except BudgetError as refused:
                if counted < most:
                    counted = most  # of that many the least budget that it names is enough
                    continue
                if not most:
                    raise
                try:  # states may take more than what random ops make
                    return _able_to_repeat(planner(_repeating_none(graph), hardware, budget_bytes), graph)
                except BudgetError as other:
                    raise min(refused, other, key=lambda one: one.least_feasible_bytes or MAX_BYTES) from None
            needed = states_of(made) if each_bytes else 0
            found = _with_states(made, graph.static_bytes, needed * each_bytes)
            if needed <= counted or not budget_bytes or found.predicted_peak_bytes <= budget_bytes:
                return found
            counted = needed

    return plan


def _repeating_none(graph: StepGraph) -> StepGraph:
    """The step in which no random op may run again."""
    return replace(graph, ops=tuple(replace(op, recomputable=op.recomputable and not op.random) for op in graph.ops))


def _able_to_repeat(plan: Plan, as_given: StepGraph) -> Plan:
    """The plan of a step in which random ops may run again, as they may in the one that was given."""
    may = {op.name for op in as_given.ops if op.recomputable}

    def restored(graph: StepGraph) -> StepGraph:
        return replace(graph, ops=tuple(replace(op, recomputable=op.name in may) for op in graph.ops))

    return replace(plan, graph=restored(plan.graph), exact_graph=plan.exact_graph and restored(plan.exact_graph))


def states_of(plan: Plan) -> int:
    """How many states it keeps: one for each random op that it repeats, and the one that is put back."""
    return _kept(_random(plan.graph, plan.recomputed))


def repeated(graph: StepGraph, residences: Mapping[str, Residence]) -> int:
    """How many random ops are repeated under residences: that many states wait between the passes."""
    again = (graph.storage_called[s] for s, one in residences.items() if isinstance(one, Recompute) and one.before)
    return _random(graph, again)


def _random(graph: StepGraph, storages: Iterable[Storage]) -> int:
    return sum(graph.ops[op].random for op in {graph.producer[storage.id] for storage in storages})


def _with_states(plan: Plan, static_bytes: int, states_bytes: int) -> Plan:
    static_bytes += states_bytes
    exact = plan.exact_graph and replace(plan.exact_graph, static_bytes=static_bytes)
    graph = replace(plan.graph, static_bytes=static_bytes)
    return replace(plan, graph=graph, exact_graph=exact, states_bytes=states_bytes)


def _kept(again: int) -> int:
    return again + 1 if again else 0
