"""The largest batch that fits a budget, in few tries."""

from __future__ import annotations

from collections.abc import Callable

from shoal.errors import BudgetError, CaptureError, InputError, ShoalError

MAX_IMAGES = 2**16


def largest_fitting(
    peak_of: Callable[[int], int],
    fixed_bytes: int,
    budget_bytes: int,
    *,
    first: int,
    max_batch: int = MAX_IMAGES,
    trying: Callable[[int], object] = lambda batch: None,
) -> tuple[int, int]:
    """The largest batch that fits `budget_bytes`.

    Doubles the batch until it no longer fits, then narrows down by the peaks of the plans that were found.
    Answers below 200 images are exact: the next image does not fit. Above, a batch 1 % larger does not. It assumes that
    where a batch does not fit, no larger one does.

    Args:
        peak_of: batch → the peak of a plan that fits; raises BudgetError where none does, which names the lowest peak.
        fixed_bytes: about what a step needs without any images.
        budget_bytes: most bytes at any position of the step.
        first: the batch to begin with.
        max_batch: the batch to stop at.
        trying: called with each batch before it is planned.

    Returns:
        The batch, and the smallest that was tried and does not fit; 0 where every one fits that was tried.

    Raises:
        BudgetError: not even one image fits.
        CaptureError, InputError: the first batch cannot be planned, for another reason.

    Example:
        >>> def peak_of(batch):
        ...     if 100 + 7 * batch > 1000:
        ...         raise BudgetError("too small", least_feasible_bytes=100 + 7 * batch)
        ...     return 100 + 7 * batch
        >>> largest_fitting(peak_of, 100, 1000, first=16)
        (128, 129)
    """
    fits, too_many = 0, 0
    unfit: BudgetError | None = None
    narrowing = _Narrowing(budget_bytes, fixed_bytes)
    batch = min(first, max_batch)
    while True:
        trying(batch)
        try:
            peak_bytes = peak_of(batch)
        except BudgetError as error:
            too_many, unfit = batch, error
            narrowing.learn(batch, error.least_feasible_bytes or 0)
        except (CaptureError, InputError) as error:
            if not fits:  # for no batch at all; or, below one that does not fit, for none so small
                refusal: ShoalError = unfit or error
                raise refusal from None
            too_many = batch
            narrowing.forget()
        else:
            fits = batch
            narrowing.learn(batch, peak_bytes)
        if not too_many:
            if fits >= max_batch:
                return fits, 0
            batch = min(2 * fits, max_batch)
        elif too_many - fits <= one_per_cent(fits):
            break
        else:
            batch = narrowing.between(fits, too_many)
    if not fits and unfit is not None:
        raise unfit.with_detail("batch", too_many)
    return fits, too_many


def one_per_cent(images: int) -> int:
    """How far a batch may be from the largest one."""
    return max(1, images // 100)


class _Narrowing:
    """Where to look next between a batch that fits and one that does not.

    The lowest peak of a batch is nearly a constant plus so much for each image: the line through what is known of it
    hits the answer in a few tries. Where it leads to the same side again and again, each try is twice as far towards
    the other. Peaks are above the lowest where a batch fits easily, so those that a larger batch is below do not count.
    """

    def __init__(self, budget_bytes: int, fixed_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._known = [(0, fixed_bytes)]
        self._on_one_side = 0  # tries since the last one on the other; below 0: that did not fit

    def learn(self, batch: int, peak_bytes: int) -> None:
        """Note what a number of images needs."""
        fits = peak_bytes <= self._budget_bytes
        self._on_one_side = max(0, self._on_one_side) + 1 if fits else min(0, self._on_one_side) - 1
        self._known = [(n, peak) for n, peak in self._known if (n - batch) * (peak - peak_bytes) > 0]
        self._known.append((batch, peak_bytes))

    def forget(self) -> None:
        """Note that it is not for bytes that a batch is too large."""
        self._known = []

    def between(self, fits: int, too_many: int) -> int:
        """A batch above `fits` and below `too_many`."""
        if len(self._known) < 2:
            return (fits + too_many) // 2
        (here, here_bytes), (there, there_bytes) = self._known[-2:]
        share = (self._budget_bytes - here_bytes) / (there_bytes - here_bytes)
        aim = here + int(share * (there - here))
        if (times := abs(self._on_one_side)) > 1:
            further = one_per_cent(fits) * 2 ** (times - 2)
            aim += further if self._on_one_side > 0 else -further
        return min(max(aim, fits + one_per_cent(fits)), too_many - 1)
