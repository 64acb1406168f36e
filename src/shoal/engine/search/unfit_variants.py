"""Variants that do not fit by their bounds, and may by recomputing again and again, or in another order.

A search for the smallest plan takes as long as a plan, a close estimate of it far less, and a rough one next to
nothing. So variants are estimated roughly, exact and with all encoded that may be; then the most promising of them is
estimated closely, or planned if it was already. What others show to be of no use is neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Generic

from shoal.core.sizes import MAX_BYTES
from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE, Variant
from shoal.engine.search.encoding import IF_FASTER
from shoal.engine.search.priced import Made, PricedVariant
from shoal.engine.search.search_state import Best, SearchState
from shoal.engine.search.variants import Graph
from shoal.errors import BudgetError
from shoal.planners.estimates import quick_least
from shoal.planners.infeasible import fewest_bytes


@dataclass(frozen=True)
class Way(Generic[Graph, Made]):
    """A variant that does not fit by its bound, exact or encoded.

    Attributes:
        candidate: which.
        encoded: whether storages may be encoded.
        step: as it is then: with all encoded that may be.
        expected_bytes: what it is expected to need at least; where nothing can fit, about what it needs.
        found_bytes: the peak of a plan that was found in a moment.
        is_close: whether these are as close as estimates come.
    """

    candidate: PricedVariant[Graph, Made]
    encoded: bool
    step: StepGraph
    expected_bytes: int = 0
    found_bytes: int = 0
    is_close: bool = False

    def estimated(self, budget_bytes: int, *, closely: bool) -> Way[Graph, Made]:
        """With an estimate of what it needs; of one with an op that needs more than the budget, never closely."""
        least = quick_least(self.step, MAX_BYTES if closely else 0)
        expected_bytes, is_hopeless = least.expected_bytes, fewest_bytes(self.step) > budget_bytes
        if is_hopeless:
            expected_bytes = least.found_bytes
        return replace(
            self, expected_bytes=expected_bytes, found_bytes=least.found_bytes, is_close=closely or is_hopeless
        )

    def at_least(self, lowest_shares: Mapping[bool, float]) -> float:
        """What it is expected to need.

        Args:
            lowest_shares: what others need, or are expected to, as a share of `found_bytes`, at least; of those with
                close estimates and of the others.
        """
        return max(self.expected_bytes, lowest_shares[self.is_close] * self.found_bytes)

    def place(self, budget_bytes: int, lowest_shares: Mapping[bool, float]) -> tuple[bool, float, bool]:
        """For `min`: what is expected to fit, the fastest first, then what needs least."""
        needed_bytes = self.at_least(lowest_shares)
        may_fit = needed_bytes <= budget_bytes
        return not may_fit, self.step.plain_seconds if may_fit else needed_bytes, not self.encoded


def plan_unfit(
    state: SearchState[Graph, Made], is_encoded: Callable[[Variant], bool], *, for_the_minimum: bool
) -> None:
    """Plan them, exact and with storages encoded.

    While nothing fits, a variant is planned if it is expected to need fewer bytes than are known to be enough. Expected
    is the smallest share, over the variants so far, of what a quick plan of the variant needs. Once a plan
    fits, a variant is planned if its quick plan fits. One that was planned with storages encoded might have been exact.

    Args:
        state: what is known; the best plan is noted there, and what each variant needs.
        is_encoded: whether a variant was planned with storages encoded already.
        for_the_minimum: whether variants are planned that are not expected to fit, for what they need.
    """
    budget_bytes = state.budget_bytes
    planned: set[Variant] = set()
    lowest_shares = {False: 0.0, True: 0.0}
    ways = _ways(state, is_encoded, for_the_minimum=for_the_minimum)
    waiting = [way.estimated(budget_bytes, closely=False) for way in ways]
    while waiting:
        way = min(waiting, key=lambda way: way.place(budget_bytes, lowest_shares))
        waiting.remove(way)
        variant = way.candidate.variant
        is_known = variant in planned or {(variant, way.encoded), (variant, True)} & state.refused.keys()
        if state.best is not None:
            may_fit = (way.found_bytes if way.is_close else way.at_least(lowest_shares)) <= budget_bytes
        else:
            enough_bytes = _enough_bytes(state) if for_the_minimum else budget_bytes + 1
            may_fit = way.at_least(lowest_shares) < enough_bytes
        if is_known or not may_fit or not state.may_gain(way.step.plain_seconds):
            continue
        if not way.is_close:
            close = way.estimated(budget_bytes, closely=True)
            lowest_shares[False] = _lower(lowest_shares[False], close.expected_bytes / way.found_bytes)
            waiting.append(close)
            continue
        try:
            found = _planned(way, budget_bytes)
        except BudgetError as error:
            state.refuse(variant, error, encoded=way.encoded)
            least_bytes = error.least_feasible_bytes or 0
            for is_close, found_bytes in ((True, way.found_bytes), (False, quick_least(way.step, 0).found_bytes)):
                lowest_shares[is_close] = _lower(lowest_shares[is_close], least_bytes / found_bytes)
            continue
        planned.add(variant)
        state.note_plan(found)
        state.take_if_faster(found)


def _lower(known_share: float, share: float) -> float:
    return min(1.0, share, known_share or share)


def nearest(state: SearchState[Graph, Made]) -> BudgetError:
    """Of the refusals, the one that names the least."""
    (variant, _), error = min(state.refused.items(), key=lambda one: one[1].least_feasible_bytes or math.inf)
    return error if replace(variant, shrunk=False) == WHOLE else error.with_detail("variant with the minimum", variant)


def _ways(
    state: SearchState[Graph, Made], is_encoded: Callable[[Variant], bool], *, for_the_minimum: bool
) -> list[Way[Graph, Made]]:
    """Each variant that does not fit by its bound and may gain, exact and all encoded."""
    ways = [Way(candidate, False, candidate.priced.graph) for candidate in state.unfit]
    for candidate in state.unfit:
        may_fit = state.may_fit(candidate) or (for_the_minimum and state.best is None)
        if candidate.priced.encoded is not None and may_fit and not is_encoded(candidate.variant):
            ways.append(Way(candidate, True, candidate.priced.encoded.graph(1.0)))
    return [way for way in ways if state.may_gain(way.step.plain_seconds)]


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
