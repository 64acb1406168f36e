"""What `joint` would come to, in a moment: lower bounds of a step's seconds, and about the least bytes it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shoal.core.step import StepGraph
from shoal.planners.infeasible import fewest_bytes
from shoal.planners.integer_program import Chosen, solve
from shoal.planners.limits import DEFAULT, Guard, Limits, cached_unless_stopped
from shoal.planners.on_demand import plans_on_demand
from shoal.planners.recompute_choice import recompute_choice
from shoal.planners.simulated import as_chosen, in_lower_order

_KNOWN = 128  # of each variant, in each loop: a budget that is refused asks for all of them twice, about 40 each time
_LOWERED = 0.9  # a smallest plan is at most so much lower than that of `least_peak_bytes`
_QUICKLY_LOWERED = 0.75  # the same of `about_least_bytes`


def estimate(
    graph: StepGraph, budget_bytes: int, *, limits: Limits = DEFAULT, guard: Guard | None = None
) -> tuple[float, float]:
    """An estimate of what `joint` finds, in a moment: bytes over the budget, and seconds of the step.

    The seconds are `least_seconds`. Where nothing fits by that, they are infinite, and the bytes are those of the
    program with the least room; it may still be that recomputing more than once fits.
    """
    if math.isfinite(seconds := least_seconds(graph, budget_bytes, limits=limits)):
        return 0.0, seconds
    choice = recompute_choice(graph)
    least = solve(choice, None, whole=False, limits=limits, guard=guard)
    chosen = least.chosen or Chosen(frozenset())
    return max(0.0, as_chosen(choice, chosen).peak_bytes - budget_bytes), math.inf


@cached_unless_stopped(_KNOWN, lambda found: ())
def least_seconds(graph: StepGraph, budget_bytes: int, *, limits: Limits = DEFAULT) -> float:
    """The lower bound of the step inside the budget; infinity where nothing fits by it.

    It is that of the relaxed program, with every storage its choice and parts of storages in several places, for the
    ops in the order in which they were captured and in that of the lowest peak. In yet another order a plan can be
    faster, and fit.
    """
    choice, guard = recompute_choice(graph), Guard(limits.guard_seconds)
    kept = as_chosen(choice, Chosen(frozenset(choice.candidates)))
    if kept.peak_bytes <= budget_bytes:
        return graph.plain_seconds
    ordered = in_lower_order(kept, limits, guard)
    if ordered is not None and ordered.peak_bytes <= budget_bytes:
        return min(graph.plain_seconds, ordered.graph.plain_seconds) if graph.has_launches else graph.plain_seconds
    graphs = [graph] if ordered is None else [graph, ordered.graph]
    wide = [recompute_choice(one, every=True) for one in graphs]
    found = [solve(one, budget_bytes, early=False, whole=False, limits=limits, guard=guard) for one in wide]
    return min(one.graph.plain_seconds + bound.bound_seconds for one, bound in zip(wide, found, strict=True))


def about_least_bytes(graph: StepGraph) -> int:
    """The peak of one plan on demand, with the ops in their order: within some percent of the smallest, in a moment."""
    quick = replace(DEFAULT, order=False, kept_sets=1)
    return plans_on_demand(replace(graph, link=None), quick)[0][0].peak_bytes


@cached_unless_stopped(_KNOWN, lambda found: ())
def least_peak_bytes(graph: StepGraph) -> int:
    """About the smallest peak that a plan has: of the plans on demand, and with a link that of the program.

    Without a link the program, which recomputes each storage once, had a peak 3 to 300 % above that of the plans on
    demand for each of ten networks.
    """
    found_bytes = plans_on_demand(replace(graph, link=None), DEFAULT)[0][0].peak_bytes
    if graph.link is None:
        return found_bytes
    choice = recompute_choice(graph)
    least = solve(choice, None, whole=False)
    return min(found_bytes, as_chosen(choice, least.chosen or Chosen(frozenset())).peak_bytes)


@dataclass(frozen=True)
class Least:
    """About the least that a step needs.

    Attributes:
        found_bytes: the peak of a plan that was found in a moment.
        expected_bytes: no plan is expected to have a lower one.
    """

    found_bytes: int
    expected_bytes: int


def quick_least(graph: StepGraph, enough_bytes: int) -> Least:
    """About the least that a step needs; more closely where that may be no more than `enough_bytes`."""
    fewest, about_bytes = fewest_bytes(graph), about_least_bytes(graph)
    expected_bytes = max(fewest, int(_QUICKLY_LOWERED * about_bytes))
    if expected_bytes > enough_bytes:
        return Least(about_bytes, expected_bytes)
    found_bytes = min(about_bytes, least_peak_bytes(graph))
    return Least(found_bytes, max(fewest, int(_LOWERED * found_bytes)))
