"""Step time against bytes: what a step takes inside each budget, from the least that works to keeping everything."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.core.plan import Plan
from shoal.core.variant import Variant


@dataclass(frozen=True)
class Storages:
    """How many storages have one residence, and their bytes."""

    count: int
    nbytes: int


@dataclass(frozen=True)
class FrontierPoint:
    """The fastest plan that was found inside one budget.

    Attributes:
        budget_bytes: most device bytes in use at any position of the step.
        predicted_peak_bytes: of the plan; at most the budget.
        seconds: of the step.
        bound_seconds: the lower bound of the step inside the budget, for the forms and orders of ops that were
            considered.
        variant: in which form the step is computed.
        kept, recomputed, offloaded, encoded: saved storages, and what the plan does with them.
    """

    budget_bytes: int
    predicted_peak_bytes: int
    seconds: float
    bound_seconds: float
    variant: Variant
    kept: Storages
    recomputed: Storages
    offloaded: Storages
    encoded: Storages

    @staticmethod
    def of(plan: Plan, budget_bytes: int, bound_seconds: float) -> FrontierPoint:
        """What there is to say of a plan inside a budget that it may have been made for or not."""
        residences = (plan.kept, plan.recomputed, plan.offloaded, plan.encoded)
        counted = (Storages(len(storages), sum(s.nbytes for s in storages)) for storages in residences)
        return FrontierPoint(
            budget_bytes, plan.predicted_peak_bytes, plan.predicted_seconds, bound_seconds, plan.variant, *counted
        )


@dataclass(frozen=True)
class FrontierData:
    """Step time against bytes, of one model's step.

    Attributes:
        model, hardware: what the step is of, and what its times are for.
        means: what was allowed, of `shoal.core.means`.
        points: by increasing budget; the first is the minimum feasible budget, the last has room for everything.
        plain_seconds, plain_peak_bytes: of the step as plain PyTorch computes it, everything kept.
        budget_bytes: where the user stands; None where no budget was given.
        left_out: forms of the step that were not considered, each with the reason.
        planning_seconds: how long it took.
    """

    model: str
    hardware: str
    means: tuple[str, ...]
    points: tuple[FrontierPoint, ...]
    plain_seconds: float
    plain_peak_bytes: int
    budget_bytes: int | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    planning_seconds: float = field(default=0.0, compare=False)

    @property
    def inside_budget(self) -> FrontierPoint | None:
        """The fastest point inside the user's budget; None where none fits, or no budget was given."""
        if self.budget_bytes is None:
            return None
        return next((p for p in reversed(self.points) if p.budget_bytes <= self.budget_bytes), None)

    def added_share(self, point: FrontierPoint) -> float:
        """What a point adds to plain PyTorch's step, as a share of it; less than 0 where it is faster."""
        return point.seconds / self.plain_seconds - 1 if self.plain_seconds else 0.0
