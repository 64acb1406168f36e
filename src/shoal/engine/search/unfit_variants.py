"""Variants that do not fit by their bounds, and may by recomputing again and again, or in another order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from shoal.core.variant import WHOLE, Variant
from shoal.engine.search.encoding import IF_FASTER
from shoal.engine.search.nearest_first import Way, nearest_first
from shoal.engine.search.priced import Made
from shoal.engine.search.search_state import Best, SearchState
from shoal.engine.search.variants import Graph
from shoal.errors import BudgetError
from shoal.planners.infeasible import fewest_bytes


def plan_unfit(
    state: SearchState[Graph, Made], is_encoded: Callable[[Variant], bool], *, for_the_minimum: bool
) -> None:
    """Plan them, exact and with storages encoded.

    While nothing fits, a variant is planned if it is expected to need fewer bytes than are known to be enough. Expected
    is the smallest share, over the variants planned so far, of what a quick plan of the variant needs. Once a plan
    fits, a variant is planned if its quick plan fits. One that was planned with storages encoded might have been exact.

    Args:
        state: what is known; the best plan is noted there, and what each variant needs.
        is_encoded: whether a variant was planned with storages encoded already.
        for_the_minimum: whether variants are planned that are not expected to fit, for what they need.
    """
    planned: set[Variant] = set()
    lowest_share = 0.0  # what a variant needs, as a share of what its quick plan needs; of the variants planned so far
    for way in _ways_to_the_least(state, is_encoded):
        variant = way.candidate.variant
        is_known = variant in planned or {(variant, way.encoded), (variant, True)} & state.refused.keys()
        expected_bytes = max(way.expected_bytes, lowest_share * way.found_bytes)
        enough_bytes = _enough_bytes(state) if for_the_minimum else state.budget_bytes + 1
        may_fit = expected_bytes < enough_bytes if state.best is None else state.fits(way.found_bytes)
        if is_known or not may_fit or not state.may_gain(way.step.plain_seconds):
            continue
        try:
            found = _planned(way, state.budget_bytes)
        except BudgetError as error:
            state.refuse(variant, error, encoded=way.encoded)
            share = min(1.0, (error.least_feasible_bytes or 0) / way.found_bytes)
            lowest_share = min(lowest_share, share) if lowest_share else share
            continue
        planned.add(variant)
        state.note_plan(found)
        state.take_if_faster(found)


def nearest(state: SearchState[Graph, Made]) -> BudgetError:
    """Of the refusals, the one that names the least."""
    (variant, _), error = min(state.refused.items(), key=lambda one: one[1].least_feasible_bytes or math.inf)
    return error if replace(variant, shrunk=False) == WHOLE else error.with_detail("variant with the minimum", variant)


def _ways_to_the_least(
    state: SearchState[Graph, Made], is_encoded: Callable[[Variant], bool]
) -> list[Way[Graph, Made]]:
    """Each variant that does not fit by its bound and may gain, exact and all encoded; the most promising first."""
    ways = [Way(candidate, False, candidate.priced.graph) for candidate in state.unfit]
    for candidate in state.unfit:
        if candidate.priced.encoded is not None and state.may_fit(candidate) and not is_encoded(candidate.variant):
            ways.append(Way(candidate, True, candidate.priced.encoded.graph(1.0)))
    ways = [way for way in ways if state.may_gain(way.step.plain_seconds)]
    if state.best is not None:  # what needs more, whatever its plan, is of no use any more
        ways = [way for way in ways if state.fits(fewest_bytes(way.step))]
    return nearest_first(ways, state.budget_bytes)


def _planned(way: Way[Graph, Made], budget_bytes: int) -> Best[Graph, Made]:
    """The plan.

    Raises:
        BudgetError: there is none.
    """
    candidate = way.candidate
    if way.encoded:
        assert candidate.priced.encoded is not None
        made, plan = candidate.priced.encoded.plan(budget_bytes, IF_FASTER)
    else:
        made, plan = candidate.priced.plan(budget_bytes)
    return Best(candidate.variant, candidate.graph, made, plan)


def _enough_bytes(state: SearchState[Graph, Made]) -> float:
    """The least that any variant was found to need."""
    return min((error.least_feasible_bytes or math.inf for error in state.refused.values()), default=math.inf)
