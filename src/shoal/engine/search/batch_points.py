"""Batches inside one budget: the largest that fits, some between one image and that, and the best of them.

Around the fastest, gaps are halved until its neighbours are within 1 %: then no batch that was planned does more images
per second, and few in between are unplanned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from shoal.core.frontier import BatchPoint
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.core.variant import WHOLE
from shoal.engine.search.max_batch import one_per_cent
from shoal.errors import BudgetError, CaptureError, InputError

_NEAR = 0.25  # of the distance of two points: a batch that is planned and so near stands for one that is not


class Plans(Protocol):
    """See `shoal.engine.plans_by_batch.PlansByBatch`."""

    @property
    def budget_bytes(self) -> int:
        """What all plans are inside."""

    def __call__(self, batch: int) -> Plan:
        """The plan at a batch; raises BudgetError where none fits."""

    def fitting_bytes(self, batch: int) -> int:
        """The peak of a plan that fits, however slow; raises BudgetError where none does."""

    def largest(self, trying: Callable[[int], object], *, fits: Callable[[int], int]) -> tuple[int, int]:
        """The largest batch that has a plan, and one that is too large or 0; `fits` is asked for `fitting_bytes`."""


@dataclass(frozen=True)
class FoundBatches:
    """As the attributes of `BatchFrontier`."""

    points: tuple[BatchPoint, ...]
    unfit: tuple[tuple[int, str], ...]


def batch_points(plans: Plans, n_points: int, trying: Callable[[str], object] = lambda what: None) -> FoundBatches:
    """Plan batches inside a budget.

    Args:
        plans: plans a batch, and finds the largest.
        n_points: about how many, evenly spaced from one image to the largest batch that fits.
        trying: called with what is done next, in words.

    Raises:
        BudgetError: not even one image fits.
        CaptureError, InputError: as `plans`.
    """
    kept = _KeptPlans(plans, lambda batch: trying(f"{batch} images"))
    largest, _ = plans.largest(lambda batch: trying(f"the largest batch: {batch} images"), fits=kept.fits)
    kept.spread(n_points, largest)
    kept.narrow_to_best()
    return kept.found()


class _KeptPlans:
    """Collects what is planned."""

    def __init__(self, plans: Plans, trying: Callable[[int], object]) -> None:
        self._plans = plans
        self._trying = trying
        self._points: dict[int, BatchPoint] = {}
        self._unfit: dict[int, str] = {}

    def plan(self, batch: int) -> None:
        """Plan a batch.

        Raises:
            BudgetError, CaptureError, InputError: there is no plan; that is remembered.
        """
        with self._reasons_noted(batch):
            self._points[batch] = _point(batch, self._plans(batch), self._plans.budget_bytes)

    def fits(self, batch: int) -> int:
        """The peak of a plan of a batch that fits.

        Raises:
            BudgetError, CaptureError, InputError: there is none; that is remembered.
        """
        with self._reasons_noted(batch):
            return self._plans.fitting_bytes(batch)

    @contextmanager
    def _reasons_noted(self, batch: int) -> Iterator[None]:
        try:
            yield
        except BudgetError as error:
            least_bytes = error.least_feasible_bytes
            self._unfit[batch] = f"needs {format_bytes(least_bytes)}" if least_bytes else "does not fit"
            raise
        except (CaptureError, InputError) as error:
            self._unfit[batch] = str(error)
            raise

    def spread(self, n_points: int, largest: int) -> None:
        """Plan batches that are evenly spaced from 1 to `largest`, where none is planned that is near."""
        apart = max(1.0, (largest - 1) / (n_points - 1))
        for n in range(n_points):
            batch = 1 + (largest - 1) * n // (n_points - 1)
            known = self._points.keys() | self._unfit.keys()
            is_end = batch in (1, largest)
            if batch not in known and (is_end or all(abs(batch - other) > _NEAR * apart for other in known)):
                self._try(batch)

    def narrow_to_best(self) -> None:
        """Halve the gaps next to the best until its neighbours are within 1 %."""
        while True:
            known = sorted(self._points.keys() | self._unfit.keys())
            best = max(self._points.values(), key=lambda point: (point.images_per_second, -point.batch)).batch
            at = known.index(best)
            gaps = pairwise(known[max(0, at - 1) : at + 2])
            below, above = max(gaps, key=lambda gap: gap[1] - gap[0], default=(best, best))
            if above - below <= one_per_cent(best):
                return
            self._try((below + above) // 2)

    def _try(self, batch: int) -> None:
        self._trying(batch)
        with suppress(BudgetError, CaptureError, InputError):  # it is remembered, with the reason
            self.plan(batch)

    def found(self) -> FoundBatches:
        """All of it, by increasing batch."""
        points = tuple(point for _, point in sorted(self._points.items()))
        return FoundBatches(points, tuple(sorted(self._unfit.items())))


def _point(batch: int, plan: Plan, budget_bytes: int) -> BatchPoint:
    # None if there is no other variant.
    whole = next((candidate for candidate in plan.candidates if candidate.variant == WHOLE), None)
    bounds = (candidate.bound_seconds for candidate in plan.candidates if candidate.bound_seconds is not None)
    return BatchPoint.of(
        plan,
        budget_bytes,
        min(bounds, default=plan.plain_seconds + plan.lower_bound_seconds),
        batch=batch,
        plain_seconds=plan.plain_seconds if whole is None else whole.plain_seconds,
        plain_peak_bytes=plan.plain_peak_bytes if whole is None else whole.plain_peak_bytes + whole.rewrites_save_bytes,
    )
