"""A plan under construction: residences of a step in some order of its ops, and their exact cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core.residence import Residence
from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds
from shoal.core.step import StepGraph
from shoal.planners.integer_program import Chosen
from shoal.planners.just_in_time import just_in_time
from shoal.planners.limits import Effort, Guard, Limits
from shoal.planners.order import lower_peak
from shoal.planners.recompute_choice import RecomputeChoice


@dataclass(frozen=True)
class Simulated:
    """Residences of a step in some order, and their exact cost."""

    graph: StepGraph
    residences: Mapping[str, Residence]
    peak_bytes: int
    seconds: float


def as_chosen(choice: RecomputeChoice, chosen: Chosen) -> Simulated:
    """The plan that recomputes what is not kept as late as possible; what is offloaded counts as recomputed."""
    return simulated(choice.graph, just_in_time(choice.graph, choice.kept_for(chosen.kept)))


def simulated(graph: StepGraph, residences: Mapping[str, Residence]) -> Simulated:
    return Simulated(graph, residences, *peak_and_seconds(graph, schedule(graph, residences)))


def everything_away(choice: RecomputeChoice) -> Chosen:
    saved = frozenset(s for s in choice.graph.saved if choice.graph.storages[s].kind == "activation")
    return Chosen(frozenset(choice.candidates) - saved, saved)


def in_lower_order(found: Simulated, limits: Limits, guard: Guard) -> Simulated | None:
    """The same storages kept and recomputed, in an order of ops with a lower peak; None where none was found."""
    if not limits.order:
        return None
    ordered = lower_peak(found.graph, found.residences, Effort("order of ops", limits.order_ops, guard))
    return simulated(ordered.graph, ordered.residences) if ordered is not None else None
