"""One plan for calls that overlap: several forward passes of a model before the first backward pass.

While one call runs, the others' saved storages wait; from the first backward pass on, its gradients do in their place.
All calls have the same plan, so what waits depends on the plan: the room set aside for it is searched by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from shoal.core.over_budget import over_budget
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE
from shoal.engine.loop_memory import HELD_GRADIENTS, by_itself, dropped_bytes
from shoal.errors import BudgetError

_ROUNDS = 6
_CLOSE_ENOUGH = 0.01  # of the budget


def plan_overlapping(
    calls: int, budget_bytes: int, make: Callable[[int], Plan], in_force: Iterable[Plan] = ()
) -> tuple[int, Plan]:
    """A plan for each of `calls` calls that come before the first backward pass.

    Args:
        calls: how many; with one, this is `make(0)`.
        budget_bytes: device bytes of all calls together; 0 for no limit.
        make: plans one call with that many bytes of the budget set aside, which are counted as static memory of its
            step.
        in_force: plans of other steps of the model: calls of those may wait, too.

    Returns:
        What `make` was given, and the plan; its step's static memory then has what the other calls hold.

    Raises:
        BudgetError: no plan fits that number of calls.
    """
    alone = make(0)
    if calls == 1:
        return 0, alone
    known_bytes = max((waiting_bytes(plan) for plan in in_force), default=0)

    def bytes_of_others(plan: Plan) -> int:
        waiting = max(known_bytes, waiting_bytes(plan))
        gradient_bytes = sum(s.nbytes for s in plan.graph.storages if s.kind == "gradient")
        return max((calls - 1) * waiting, (calls - 2) * waiting + gradient_bytes)

    aside_bytes = bytes_of_others(alone)
    if not budget_bytes or alone.predicted_peak_bytes + aside_bytes <= budget_bytes:
        return 0, _with_static(alone, aside_bytes)
    best: tuple[int, Plan] | None = None
    too_few, too_many = 0, budget_bytes
    for _ in range(_ROUNDS):
        try:
            plan = make(aside_bytes)
        except BudgetError:
            too_many = aside_bytes
        else:
            if bytes_of_others(plan) <= aside_bytes:
                best, too_many = (aside_bytes, plan), aside_bytes
            else:
                too_few = aside_bytes
        if too_many - too_few <= _CLOSE_ENOUGH * budget_bytes:
            break
        aside_bytes = (too_few + too_many) // 2
    aside_bytes, plan = best or _with_the_most_aside(calls, budget_bytes, alone, make, bytes_of_others)
    return aside_bytes, _with_static(plan, bytes_of_others(plan) - aside_bytes)


def waiting_bytes(plan: Plan) -> int:
    """Bytes that a call has in use between its two passes while another one runs, its inputs included.

    Until the loss is sent back its outputs wait, and from then on their gradients: in addition to them where the loop
        still
    holds them, in their place where nothing does.
    """
    graph = plan.graph
    at_loss = next(moment for moment in plan.timeline.moments if moment.phase == "loss")
    held = graph.storage_called.get(HELD_GRADIENTS)
    held_bytes = held.nbytes if held is not None else 0
    gradient_bytes = sum(graph.storages[s].nbytes for s in by_itself(graph).op_called[at_loss.op].writes)
    input_bytes = sum(s.nbytes for s in graph.storages if s.kind == "input")
    more_bytes = max(0, gradient_bytes - (dropped_bytes(graph) - held_bytes))
    return input_bytes + at_loss.kept_bytes - held_bytes + more_bytes


def most_waiting_bytes(plan: Plan) -> int:
    """What `waiting_bytes` is at most, under whatever plan of the same step; more where this plan has another form than
    the author's, whose own graph is not at hand."""
    if plan.variant == WHOLE:
        return max(waiting_bytes(plan), waiting_bytes(replace(plan, residences={})))
    graph = plan.graph
    input_bytes = sum(s.nbytes for s in graph.storages if s.kind == "input")
    return max(waiting_bytes(plan), plan.plain_peak_bytes - graph.resident_bytes + input_bytes)


def _with_the_most_aside(
    calls: int,
    budget_bytes: int,
    alone: Plan,
    make: Callable[[int], Plan],
    bytes_of_others: Callable[[Plan], int],
) -> tuple[int, Plan]:
    """With all room for the others that a call of the least peak leaves; refused where that is too little."""
    try:
        return budget_bytes, make(budget_bytes)
    except BudgetError as error:
        least_bytes = (error.least_feasible_bytes or 0) - budget_bytes
    aside_bytes = budget_bytes - least_bytes
    plan = make(aside_bytes)
    others_bytes = bytes_of_others(plan)
    if others_bytes <= aside_bytes:
        return aside_bytes, plan
    enough_bytes = least_bytes + others_bytes
    raise over_budget(
        alone.graph.model,
        enough_bytes,
        budget_bytes,
        instead="call backward() after each call",
        details={"calls before a backward pass": calls, "minimum of one call": format_bytes(least_bytes)},
    )


def _with_static(plan: Plan, more_bytes: int) -> Plan:
    def more(graph: StepGraph) -> StepGraph:
        return replace(graph, static_bytes=graph.static_bytes + more_bytes)

    return replace(plan, graph=more(plan.graph), exact_graph=plan.exact_graph and more(plan.exact_graph))
