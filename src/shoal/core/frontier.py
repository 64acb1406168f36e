"""Step time against bytes: what a step takes inside each budget, from the least that works to keeping everything.

And images per second against batch: what a step of each size takes inside one budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from shoal.core.plan import Plan
from shoal.core.variant import Variant

USABLE = 2.0
"""A step that takes more than that many times plain PyTorch's is called unusable."""


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
        bound_seconds: the lower bound of the step inside the budget, for the variants and orders of ops that were
            considered.
        variant: in which variant the step is computed.
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

    @classmethod
    def of(cls, plan: Plan, budget_bytes: int, bound_seconds: float, **more: Any) -> Self:
        """What there is to say of a plan inside a budget that it may have been made for or not.

        Args:
            more: the attributes that a subclass adds.
        """
        residences = (plan.kept, plan.recomputed, plan.offloaded, plan.encoded)
        counted = (Storages(len(storages), sum(s.nbytes for s in storages)) for storages in residences)
        figures = plan.predicted_peak_bytes, plan.predicted_seconds, bound_seconds
        return cls(budget_bytes, *figures, plan.variant, *counted, **more)

    def share(self, storages: Storages) -> float:
        """Bytes of `kept`, `recomputed`, `offloaded` or `encoded`, as a share of all four."""
        all_bytes = sum(one.nbytes for one in (self.kept, self.recomputed, self.offloaded, self.encoded))
        return storages.nbytes / all_bytes if all_bytes else 0.0


@dataclass(frozen=True)
class FrontierData:
    """Step time against bytes, of one model's step.

    Attributes:
        model, hardware: what the step is of, and what its times are for.
        means: what was allowed, of `shoal.core.means`.
        points: by increasing budget; the first is the minimum feasible budget, the last has room for everything.
        plain_seconds, plain_peak_bytes: of the step as plain PyTorch computes it, everything kept and nothing
            rewritten; lossless rewrites by themselves may save bytes, so that the last point has fewer.
        budget_bytes: where the user stands; None where no budget was given.
        left_out: variants of the step that were not considered, each with the reason.
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

    @property
    def usable(self) -> FrontierPoint | None:
        """The smallest budget whose step takes at most twice plain PyTorch's; None where none does.

        The minimum feasible budget may leave room for nothing but recomputing everything before each op that reads it.
        """
        return next((p for p in self.points if p.seconds <= USABLE * self.plain_seconds), None)

    def added_share(self, point: FrontierPoint) -> float:
        """What a point adds to plain PyTorch's step, as a share of it; less than 0 where it is faster."""
        return point.seconds / self.plain_seconds - 1 if self.plain_seconds else 0.0


@dataclass(frozen=True)
class BatchPoint(FrontierPoint):
    """The plan of a step of one batch, inside the budget that all batches have.

    Attributes:
        batch: images in the step.
        plain_seconds, plain_peak_bytes: of the step as plain PyTorch computes it, everything kept, whether that fits or
            not.
    """

    batch: int
    plain_seconds: float
    plain_peak_bytes: int

    @property
    def images_per_second(self) -> float:
        """Predicted."""
        return self.batch / self.seconds

    @property
    def bound_images_per_second(self) -> float:
        """No plan of the variants and orders of ops that were considered does more."""
        return self.batch / self.bound_seconds

    @property
    def plain_images_per_second(self) -> float | None:
        """What plain PyTorch does; None where it does not fit."""
        return self.batch / self.plain_seconds if self.plain_peak_bytes <= self.budget_bytes else None


@dataclass(frozen=True)
class BatchFrontierData:
    """Images per second against batch inside one budget, of one model.

    Attributes:
        model, hardware: what the steps are of, and what their times are for.
        means: what was allowed, of `shoal.core.means`.
        budget_bytes: most device bytes in use at any position of a step.
        points: by increasing batch; the last is the largest that fits.
        unfit: batches that were tried and have no plan, each with the reason.
        planning_seconds: how long it took.
    """

    model: str
    hardware: str
    means: tuple[str, ...]
    budget_bytes: int
    points: tuple[BatchPoint, ...]
    unfit: tuple[tuple[int, str], ...] = ()
    planning_seconds: float = field(default=0.0, compare=False)

    @property
    def best(self) -> BatchPoint:
        """The point of the most images per second."""
        return max(self.points, key=lambda point: (point.images_per_second, -point.batch))

    @property
    def largest(self) -> BatchPoint:
        """The point of the largest batch that fits."""
        return self.points[-1]

    @property
    def too_many(self) -> int | None:
        """The smallest batch that was tried and does not fit, above all that do; None where every larger one fits."""
        return min((batch for batch, _ in self.unfit if batch > self.largest.batch), default=None)

    @property
    def plain_best(self) -> BatchPoint | None:
        """The point where plain PyTorch does the most images per second; None where it fits in none."""
        fitting = [point for point in self.points if point.plain_images_per_second is not None]
        return max(fitting, key=lambda point: (point.plain_images_per_second or 0.0, -point.batch), default=None)
