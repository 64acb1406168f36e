"""The answer "no plan fits": what is the least that would, where its peak is, and what fills it."""

from __future__ import annotations

from shoal.core.over_budget import over_budget
from shoal.core.plan import Plan
from shoal.core.schedule import schedule
from shoal.core.simulate import alive_during, bytes_and_seconds
from shoal.core.sizes import format_bytes
from shoal.core.step import RESIDENT, Op, StepGraph
from shoal.errors import BudgetError

LARGEST = 3
_FEW_OPS = 64  # of a step of which the least is searched whatever the budget


def is_hopeless(graph: StepGraph, budget_bytes: int) -> bool:
    """Whether what stays in any variant of the step is over the budget, and a search for the least takes long.

    In every variant the same parameters, buffers, inputs and gradients are there when the step ends.
    """
    return floor_bytes(graph) > budget_bytes and len(graph.ops) > _FEW_OPS


def infeasible(least: Plan, budget_bytes: int, *, searched: bool = True) -> BudgetError:
    """The error to raise when no plan was found inside `budget_bytes`.

    Args:
        least: the plan with the smallest peak that is known, and what a time limit ended of the search for one.
        budget_bytes: what was asked for.
        searched: whether it was searched for; if not, there may be smaller ones, and the error has fewer details.

    Returns:
        The error, with every figure of its text as an attribute.
    """
    graph = least.graph
    peak_bytes, at, alive = at_peak(least)
    op, always_bytes = graph.ops[at], floor_bytes(graph)
    largest = tuple(
        (graph.storages[s].name, graph.storages[s].layer, graph.storages[s].nbytes)
        for s in sorted(alive, key=lambda s: (-graph.storages[s].nbytes, s))[:LARGEST]
    )
    persistent = f"{format_bytes(always_bytes)} of parameters, gradients, optimizer state and inputs"
    details = {"persistent": persistent}
    if always_bytes > budget_bytes:
        details["persistent"] += ", which no plan changes"
    if searched:
        details["peak at"] = f"{op.name} ({op.phase}, layer {op.layer or '-'})"
        details["largest there"] = ", ".join(f"{name} ({layer or '-'}) {format_bytes(n)}" for name, layer, n in largest)
        if op.workspace_bytes:
            details["workspace there"] = format_bytes(op.workspace_bytes)
    if least.stopped_early:
        stopped = ", ".join(least.stopped_early)
        details["stopped early"] = f"{stopped}: by a time limit; searched again, less may be enough"
    if not searched:
        details["searched"] = "no; a budget above the persistent bytes is searched in full"
    return over_budget(
        graph.model,
        peak_bytes,
        budget_bytes,
        instead=_advice(peak_bytes, always_bytes),
        details=details,
        persistent_bytes=always_bytes,
        op=op.name,
        phase=op.phase,
        layer=op.layer,
        workspace_bytes=op.workspace_bytes,
        largest=largest,
        stopped_early=least.stopped_early,
    )


def fewest_bytes(graph: StepGraph) -> int:
    """What every plan of the step needs, whatever it keeps, however its ops are ordered: a lower bound of all peaks.

    Each op needs what it reads and writes, and all gradients are there in the end.
    """

    def needed_bytes(op: Op) -> int:
        held = {s for s in (*op.reads, *op.writes) if graph.storages[s].kind not in RESIDENT} - {op.overwrites}
        return op.workspace_bytes + sum(graph.storages[s].nbytes for s in held)

    return max(floor_bytes(graph), graph.resident_bytes + max(map(needed_bytes, graph.ops), default=0))


def _advice(peak_bytes: int, always_bytes: int) -> str:
    if 2 * always_bytes > peak_bytes:
        return "a smaller model, or an optimizer with less state"
    return "a smaller batch or smaller inputs"


def floor_bytes(graph: StepGraph) -> int:
    """What is in use when the step ends, whatever the plan: all that stays, and every gradient."""
    return graph.resident_bytes + sum(s.nbytes for s in graph.storages if s.kind == "gradient")


def at_peak(plan: Plan) -> tuple[int, int, set[int]]:
    """The peak of a plan, the op at it, and the storages alive there, resident ones included."""
    graph = plan.graph
    runs = schedule(graph, plan.residences)
    totals, _ = bytes_and_seconds(graph, runs)
    place = max(range(len(runs)), key=totals.__getitem__)
    return totals[place], runs[place].op, alive_during(graph, runs, place)
