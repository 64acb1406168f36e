"""Plans inside many budgets: each is searched for as one budget is, with what is captured and priced kept.

Every plan stays a candidate wherever its peak fits, so that more bytes are never slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import fx

from shoal.core.frontier import USABLE, FrontierPoint
from shoal.core.plan import Plan
from shoal.core.simulate import simulate
from shoal.core.sizes import format_bytes
from shoal.core.variant import WHOLE, Candidate
from shoal.engine.search.best_variant import best_variant
from shoal.engine.search.priced import Priced
from shoal.engine.search.variants import Variants
from shoal.errors import BudgetError
from shoal.planners.estimates import about_least_bytes
from shoal.planners.infeasible import floor_bytes
from shoal.planners.limits import forget_searches

_LITTLE_MORE = (0.02, 0.1, 0.3)  # of the smallest budget, tried where that is not usable


@dataclass(frozen=True)
class FoundPoints:
    """What `frontier_points` came to; as the attributes of `Frontier`."""

    points: tuple[FrontierPoint, ...]
    plain_seconds: float
    plain_peak_bytes: int
    left_out: tuple[tuple[str, str], ...]


def frontier_points(
    variants: Variants,
    price: Callable[[fx.GraphModule], Priced[Any]],
    n_points: int,
    budget_bytes: int | None = None,
    trying: Callable[[str], object] = lambda what: None,
) -> FoundPoints:
    """Plan inside budgets from the smallest that works to what keeping everything needs.

    The smallest that works may recompute everything again and again; then a little more is planned too.

    Args:
        variants: the variants that are allowed.
        price: captures a variant and prices it.
        n_points: how many budgets, evenly spaced up to the one where everything of the fastest variant is kept; the
            last is where that is so of the step as it is.
        budget_bytes: one more, where it lies between them.
        trying: called with what is done next, in words.

    Raises:
        CaptureError: the step cannot be captured as it is.
    """
    trying("the unmodified step")
    search = _Points(variants, cache(price))
    whole = search.price(variants.graph(WHOLE))
    plain = simulate(whole.graph, {})

    def plan(within_bytes: int, more: str = "") -> None:
        trying(f"{format_bytes(within_bytes)}{more or f' of {format_bytes(plain.peak_bytes)}'}")
        search.plan(within_bytes)

    plan(plain.peak_bytes)
    kept = [(row.plain_seconds, row.plain_peak_bytes) for row in search.rows if row.n_ops]
    trying("the smallest budget")
    least_bytes = min(search.least_bytes(floor_bytes(whole.graph)), plain.peak_bytes)
    most_bytes = max(least_bytes, min(min(kept)[1], plain.peak_bytes))
    n_spaced = n_points if most_bytes == plain.peak_bytes else n_points - 1
    budgets = {least_bytes + (most_bytes - least_bytes) * n // max(1, n_spaced - 1) for n in range(n_spaced)}
    if budget_bytes is not None and least_bytes < budget_bytes < plain.peak_bytes:
        budgets.add(budget_bytes)
    for within_bytes in sorted(budgets - {plain.peak_bytes}, reverse=True):
        plan(within_bytes)
    for within_bytes in [int((1 + share) * least_bytes) for share in _LITTLE_MORE]:
        smaller = search.fastest(within_bytes)
        if smaller is None or smaller.predicted_seconds <= USABLE * plain.seconds or within_bytes >= most_bytes:
            break
        plan(within_bytes, f": less takes {smaller.predicted_seconds / plain.seconds:.0f} times the step")
    forget_searches()
    found = {within_bytes: search.fastest(within_bytes) for within_bytes in sorted(search.bounds)}
    points = (FrontierPoint.of(plan, inside, search.bounds[inside]) for inside, plan in found.items() if plan)
    plain_peak_bytes = plain.peak_bytes + whole.graph.rewrites_save_bytes
    return FoundPoints(tuple(points), plain.seconds, plain_peak_bytes, search.left_out)


@dataclass
class _Points:
    """The plans so far.

    Attributes:
        plans: each the fastest inside one budget.
        bounds: budget → what no variant that was considered inside it can be faster than.
        rows: of all variants that were considered inside any budget.
    """

    variants: Variants
    price: Callable[[fx.GraphModule], Priced[Any]]
    plans: list[Plan] = field(default_factory=list)
    bounds: dict[int, float] = field(default_factory=dict)
    rows: list[Candidate] = field(default_factory=list)

    def plan(self, budget_bytes: int) -> None:
        """Add the fastest plan inside a budget, if any fits."""
        self.bounds[budget_bytes] = math.inf
        try:
            plan = best_variant(self.variants, self.price, budget_bytes, "").plan
        except BudgetError:
            return
        self.plans.append(plan)
        self.rows += plan.candidates
        captured = [row for row in plan.candidates if row.n_ops]
        bounds = [row.bound_seconds for row in captured if row.bound_seconds is not None]
        if self.price(self.variants.graph(WHOLE)).encoded is not None:
            bounds += [row.plain_seconds for row in captured]
        self.bounds[budget_bytes] = min(bounds)

    def least_bytes(self, floor: int) -> int:
        """The smallest budget that works, as an error names it."""
        try:
            plan = best_variant(self.variants, self.price, floor, "").plan
        except BudgetError as error:
            # A planner of one's own need not name one.
            return error.least_feasible_bytes or about_least_bytes(self.price(self.variants.graph(WHOLE)).graph)
        return plan.predicted_peak_bytes

    def fastest(self, budget_bytes: int) -> Plan | None:
        """Of all plans that fit."""
        fitting = (plan for plan in self.plans if plan.predicted_peak_bytes <= budget_bytes)
        return min(fitting, key=lambda plan: (plan.predicted_seconds, plan.predicted_peak_bytes), default=None)

    @property
    def left_out(self) -> tuple[tuple[str, str], ...]:
        """Variants that were captured inside no budget, each with the reason inside the smallest."""
        captured = {row.variant for row in self.rows if row.n_ops}
        return tuple({str(row.variant): row.outcome for row in self.rows if row.variant not in captured}.items())
