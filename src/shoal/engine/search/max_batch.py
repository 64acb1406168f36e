"""The largest batch that fits a budget, in few tries."""

from __future__ import annotations

from collections.abc import Callable

from shoal.errors import BudgetError, CaptureError, InputError, ShoalError

MAX_IMAGES = 2**16


def largest_fitting(
    plan_of: Callable[[int], object],
    fixed_bytes: int,
    budget_bytes: int,
    *,
    first: int,
    max_batch: int = MAX_IMAGES,
    trying: Callable[[int], object] = lambda batch: None,
) -> tuple[int, int]:
    """The largest batch that fits `budget_bytes`.

    Doubles the batch until it no longer fits, then narrows down by what the planner says the least budget would be.
    Answers below 200 images are exact: the next image does not fit. Above, a batch 1 % larger does not. It assumes that
    where a batch does not fit, no larger one does.

    Args:
        plan_of: plans a batch; raises BudgetError where none fits.
        fixed_bytes: about what a step needs without any images.
        budget_bytes: most bytes at any position of the step.
        first: the batch to begin with.
        max_batch: the batch to stop at.
        trying: called with each batch before it is planned.

    Returns:
        The batch, and the smallest that was tried and does not fit; 0 where every one fits that was tried.

    Raises:
        BudgetError: not even one image fits.
        CaptureError, InputError: `plan_of` cannot plan the first batch, for another reason.

    Example:
        >>> def plan_of(batch):
        ...     if 100 + 7 * batch > 1000:
        ...         raise BudgetError("too small", least_feasible_bytes=100 + 7 * batch)
        >>> largest_fitting(plan_of, 100, 1000, first=16)
        (128, 129)
    """
    fits, too_many = 0, 0
    unfit: BudgetError | None = None
    narrowing = _Narrowing(budget_bytes, fixed_bytes)
    batch = min(first, max_batch)
    while True:
        trying(batch)
        try:
            plan_of(batch)
        except BudgetError as error:
            too_many, unfit = batch, error
            narrowing.does_not_fit(batch, error.least_feasible_bytes or 0)
        except (CaptureError, InputError) as error:
            if not fits:  # for no batch at all; or, below one that does not fit, for none so small
                refusal: ShoalError = unfit or error
                raise refusal from None
            too_many = batch
        else:
            fits = batch
        if not too_many:
            if fits >= max_batch:
                return fits, 0
            batch = min(2 * fits, max_batch)
        elif too_many - fits <= one_per_cent(fits):
            break
        else:
            batch = narrowing.between(fits, too_many)
    if not fits and unfit is not None:
        raise unfit
    return fits, too_many


def one_per_cent(images: int) -> int:
    """How far a batch may be from the largest one."""
    return max(1, images // 100)


class _Narrowing:
    """Where to look next between a batch that fits and one that does not.

    The least budget of a batch is nearly a constant plus so much for each image: the line through what is known of it
    hits the answer in a few tries, and every third try halves what is left, should the line mislead.
    """

    def __init__(self, budget_bytes: int, fixed_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._last = (0, fixed_bytes)
        self._line: tuple[tuple[int, int], tuple[int, int]] | None = None
        self._tries = 0

    def does_not_fit(self, batch: int, min_bytes: int) -> None:
        """Learn that `batch` images need `min_bytes`."""
        self._line = (self._last, (batch, min_bytes))
        self._last = self._line[1]

    def between(self, fits: int, too_many: int) -> int:
        """A batch above `fits` and below `too_many`."""
        self._tries += 1
        middle = (fits + too_many) // 2
        if self._line is None or self._tries % 3 == 0:
            return middle
        (here, here_bytes), (there, there_bytes) = self._line
        if (there - here) * (there_bytes - here_bytes) <= 0:
            return middle
        share = (self._budget_bytes - here_bytes) / (there_bytes - here_bytes)
        aim = here + int(share * (there - here))
        return min(max(aim, fits + one_per_cent(fits)), too_many - 1)
