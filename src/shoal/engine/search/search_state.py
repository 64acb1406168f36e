"""What a search among the variants of a step knows so far: their prices, a row of the table for each, the best plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Generic

from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph
from shoal.core.variant import WHOLE, Candidate, Variant
from shoal.engine.search.priced import Made, PricedVariant
from shoal.engine.search.variants import Graph
from shoal.errors import BudgetError
from shoal.planners.infeasible import fewest_bytes
from shoal.planners.limits import DEFAULT

GOOD_ENOUGH = 0.02  # of the plain step: a plan that adds no more is not looked at in patches
WORTH_A_PLAN = 0.005  # of the best plan's step: a variant that may gain no more is not planned


@dataclass(frozen=True)
class Best(Generic[Graph, Made]):
    """The variant that was chosen.

    Attributes:
        variant: which.
        graph: of that variant, as `Variants` has it.
        made: what `Priced.plan` made of it.
        plan: its plan, with the table of all candidates.
    """

    variant: Variant
    graph: Graph
    made: Made
    plan: Plan


@dataclass
class SearchState(Generic[Graph, Made]):
    """What is known.

    Attributes:
        budget_bytes: most bytes in use at any position.
        rows: the table of candidates.
        candidates: those that were captured, by their fingerprints.
        unfit: those that do not fit by their bounds, or were planned in vain.
        refused: what was planned in vain, by variant and whether storages were encoded.
        best: the fastest plan; None while nothing fits.
    """

    budget_bytes: int
    rows: list[Candidate] = field(default_factory=list)
    candidates: dict[str, PricedVariant[Graph, Made]] = field(default_factory=dict)
    unfit: list[PricedVariant[Graph, Made]] = field(default_factory=list)
    refused: dict[tuple[Variant, bool], BudgetError] = field(default_factory=dict)
    best: Best[Graph, Made] | None = None

    @property
    def best_seconds(self) -> float:
        """Of the fastest plan; infinity while nothing fits."""
        return self.best.plan.predicted_seconds if self.best is not None else math.inf

    @property
    def whole(self) -> StepGraph:
        """The step as it is."""
        return next(candidate.priced.graph for candidate in self.candidates.values() if candidate.variant == WHOLE)

    def row(self, variant: Variant) -> Candidate | None:
        """The row of a variant; None while it has none."""
        return next((row for row in self.rows if row.variant == variant), None)

    def may_gain(self, bound_seconds: float) -> bool:
        """Whether a variant with this lower bound may be faster than the best plan so far, by more than a little."""
        return self.best is None or bound_seconds < (1 - WORTH_A_PLAN) * self.best_seconds

    def is_near(self, variant: Variant) -> bool:
        """Whether the plan of a variant is within `Limits.far_off` of its bound."""
        row = self.row(variant)
        if row is None or row.seconds is None or row.bound_seconds is None:
            return False
        return row.seconds - row.bound_seconds <= DEFAULT.far_off * self.whole.plain_seconds

    def must_come_nearer(self, bound_seconds: float) -> bool:
        """Whether a variant is the fastest only if its plan is much nearer to its bound than those of the unmodified
        step and of variants on slices."""
        planned = (row for row in self.rows if row.variant == WHOLE or row.variant.slices)
        ratios = [row.seconds / row.bound_seconds for row in planned if row.seconds and row.bound_seconds]
        return self.best is not None and bool(ratios) and not self.may_gain(bound_seconds * (1 + max(ratios)) / 2)

    def may_fit(self, candidate: PricedVariant[Graph, Made]) -> bool:
        """Whether the budget has room for what every plan of a variant needs."""
        return self.fits(fewest_bytes(candidate.priced.graph))

    def fits(self, nbytes: int) -> bool:
        """Whether the budget has room for that many."""
        return nbytes <= self.budget_bytes

    @property
    def is_slowed(self) -> bool:
        """Whether the best plan so far is slower than the step with everything kept, or there is none."""
        return self.is_slow(self.best_seconds)

    def is_slow(self, seconds: float) -> bool:
        """Whether a step takes longer than as it is with everything kept, by more than a little."""
        return seconds > (1 + GOOD_ENOUGH) * self.whole.plain_seconds

    @property
    def is_short_of_room(self) -> bool:
        """Whether the best plan so far is slower than the fastest variant with everything kept, or there is none."""
        fastest_seconds = min(candidate.priced.graph.plain_seconds for candidate in self.candidates.values())
        return self.best_seconds > (1 + GOOD_ENOUGH) * fastest_seconds

    def leave_out(self, variant: Variant, reason: str) -> None:
        """Note why a variant is not captured."""
        self.rows.append(Candidate(variant, 0, 0.0, 0, None, None, None, reason))

    def refuse(self, variant: Variant, error: BudgetError, encoded: bool = False) -> str:
        """Note what a variant needs; in words."""
        self.refused[variant, encoded] = error
        least_bytes = error.least_feasible_bytes
        return f"needs {format_bytes(least_bytes)}" if least_bytes else "does not fit"

    def take_if_faster(self, found: Best[Graph, Made]) -> None:
        """Let a plan be the best where it is the fastest so far."""
        if found.plan.predicted_seconds < self.best_seconds:
            self.best = found

    def note_plan(self, found: Best[Graph, Made]) -> None:
        """Put a plan that was made after all, or that encodes, into the table."""
        row = self.row(found.variant)
        assert row is not None
        self.rows[self.rows.index(row)] = replace(
            row,
            bound_seconds=row.plain_seconds + found.plan.lower_bound_seconds,
            seconds=found.plan.predicted_seconds,
            peak_bytes=found.plan.predicted_peak_bytes,
            outcome="slower",
        )

    def answer(self) -> Best[Graph, Made] | None:
        """The best plan, with the table of all candidates."""
        best = self.best
        if best is None:
            return None
        rows = tuple(replace(row, outcome="chosen") if row.variant == best.variant else row for row in self.rows)
        return replace(best, plan=replace(best.plan, variant=best.variant, candidates=rows))
