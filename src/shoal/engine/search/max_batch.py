"""The largest batch whose plan fits a budget, for any planner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.markup import escape
from rich.table import Table

from shoal import planners
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.core.step import StepGraph
from shoal.errors import BudgetError, CaptureError, InputError

MAX_IMAGES = 2**16


@dataclass(frozen=True)
class LargestBatch:
    """What a search came to.

    Attributes:
        planner: the strategy.
        batch: images of the largest step found that fits; 0 for none.
        too_many: the smallest batch that was tried and does not fit; 0 if every one fits that was tried.
        plan: the plan at `batch`.
        reason: why there is none, in one line.
    """

    planner: str
    batch: int
    too_many: int
    plan: Plan | None
    reason: str = ""

    @property
    def images_per_second(self) -> float:
        """Predicted; 0 where there is no plan."""
        return self.batch / self.plan.predicted_seconds if self.plan is not None else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `json.dump`."""
        return {
            "planner": self.planner,
            "batch": self.batch,
            "too_many": self.too_many,
            "predicted_peak_bytes": None if self.plan is None else self.plan.predicted_peak_bytes,
            "predicted_seconds": None if self.plan is None else self.plan.predicted_seconds,
            "images_per_second": None if self.plan is None else self.images_per_second,
            "reason": self.reason,
        }


def largest_batch(
    step_of: Callable[[int], StepGraph],
    hardware: Hardware,
    budget_bytes: int,
    planner: str | planners.Planner = "joint",
    *,
    first: int = 64,
    near: bool = False,
    max_images: int = MAX_IMAGES,
    trying: Callable[[int], object] = lambda batch: None,
) -> LargestBatch:
    """Find the largest batch whose plan fits `budget_bytes`.

    Doubles the batch until it no longer fits, then narrows down by what the planner says the least budget would be.
    Answers below 200 images are exact: the next image does not fit. Above, a batch 1 % larger does not.

    Args:
        step_of: batch size → step, with times; `shoal.engine.search.steps_by_batch.StepsByBatch` is one. It is asked
        for some
            ten sizes, and should remember what it gave: other planners ask for the same.
        hardware: what the steps' times are for.
        budget_bytes: most device bytes in use at any moment of the step.
        planner: a name or a function, as for `shoal.plan`.
        first: the batch to begin with.
        near: whether that is likely the answer, so that the next larger one is tried before doubling.
        max_images: the batch to stop at.
        trying: called with each batch before it is planned.

    Returns:
        The answer, also where none fits or the planner is not for this step: then `reason` says why.

    Raises:
        InputError: there is no such planner, or a number is not positive.

    Example:
        >>> import torch
        >>> from shoal.core import presets
        >>> from shoal.engine.search.steps_by_batch import StepsByBatch
        >>> with torch.device("meta"):
        ...     network = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten())
        >>> p100 = presets.get("p100-nvlink")
        >>> steps = StepsByBatch(network, lambda batch: (batch, 3, 32, 32), p100)
        >>> largest_batch(steps, p100, 8 * 2**20, "keep_all").batch
        79

    It assumes that where a batch does not fit, no larger one does. A planner whose search is limited can miss a plan;
    then the answer is a batch that fits, not the largest.
    """
    plan_with = planners.get(planner)
    name = planner if isinstance(planner, str) else getattr(planner, "__name__", "custom")

    asked: dict[int, StepGraph] = {}

    def plan_of(batch: int) -> Plan:
        asked[batch] = step_of(batch)
        return plan_with(asked[batch], hardware, budget_bytes)

    def fixed_bytes(batch: int) -> int:
        graph = asked[batch]
        return sum(s.nbytes for s in graph.storages if s.kind in _WITHOUT_IMAGES) + graph.static_bytes

    return largest_fitting(
        plan_of, fixed_bytes, budget_bytes, name, first=first, near=near, max_images=max_images, trying=trying
    )


def largest_fitting(
    plan_of: Callable[[int], Plan],
    fixed_bytes: Callable[[int], int],
    budget_bytes: int,
    name: str,
    *,
    first: int,
    near: bool = False,
    max_images: int = MAX_IMAGES,
    trying: Callable[[int], object] = lambda batch: None,
) -> LargestBatch:
    """`largest_batch` for what is planned in any way.

    Args:
        plan_of: batch size → its plan; raises BudgetError where none fits.
        fixed_bytes: batch size → bytes of its step that do not grow with it; asked for one that does not fit.
        name: of what plans.
        budget_bytes, first, near, max_images, trying: as for `largest_batch`.
    """
    for what, number in {"budget_bytes": budget_bytes, "first": first, "max_images": max_images}.items():
        if number < 1:
            raise InputError(f"{what}={number}: expected a positive int")
    found: Plan | None = None
    fits, too_many = 0, 0
    narrowing = _Narrowing(budget_bytes)
    reason = ""
    batch = min(first, max_images)
    while True:
        trying(batch)
        try:
            plan = plan_of(batch)
        except BudgetError as error:
            too_many = batch
            narrowing.does_not_fit(fixed_bytes(batch), batch, error.least_feasible_bytes or 0)
            reason = str(error)
        except (CaptureError, InputError) as error:
            if found is None:  # not for this planner or network; or, below a batch that does not fit, for none so small
                reason = reason or str(error)
                break
            too_many = batch
        else:
            fits, found = batch, plan
        if not too_many:
            if fits >= max_images:
                break
            batch = min(fits + (_one_per_cent(fits) if near and fits == first else fits), max_images)
        elif too_many - fits <= _one_per_cent(fits):
            break
        else:
            batch = narrowing.between(fits, too_many)
    return LargestBatch(name, fits, too_many, found, "" if found else reason)


def _one_per_cent(images: int) -> int:
    return max(1, images // 100)


def largest_batches(
    step_of: Callable[[int], StepGraph],
    hardware: Hardware,
    budget_bytes: int,
    names: Sequence[str] = planners.NAMES,
    *,
    first: int = 64,
    trying: Callable[[str, int], object] = lambda planner, batch: None,
) -> tuple[LargestBatch, ...]:
    """`largest_batch` for each of the planners called `names`, in that order.

    The last, which are quick, are asked first, and each other begins with the best batch so far. `trying` is called
    with the planner's name and the batch.
    """
    answers: dict[str, LargestBatch] = {}
    for name in reversed(names):
        best = max((answer.batch for answer in answers.values()), default=0)
        answers[name] = largest_batch(
            step_of,
            hardware,
            budget_bytes,
            name,
            first=best or first,
            near=best > 0,
            trying=partial(trying, name),
        )
    return tuple(answers[name] for name in names)


class _Narrowing:
    """Where to look next between a batch that fits and one that does not.

    The least budget of a batch is nearly a constant plus so much for each image: the line through what is known of it
    hits the answer in a few tries, and every third try halves what is left, should the line mislead.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._line: tuple[tuple[int, int], tuple[int, int]] | None = None
        self._tries = 0

    def does_not_fit(self, fixed_bytes: int, batch: int, min_bytes: int) -> None:
        """Learn that `batch` images need `min_bytes`, of which `fixed_bytes` are there without any."""
        self._line = ((self._line[1] if self._line else (0, fixed_bytes)), (batch, min_bytes))

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
        return min(max(aim, fits + _one_per_cent(fits)), too_many - 1)


_WITHOUT_IMAGES = frozenset({"parameter", "buffer", "constant", "gradient"})


def table(answers: Iterable[LargestBatch]) -> Table:
    """Planners side by side, for `rich.print`."""
    grid = Table(title="Largest batch", title_justify="left")
    grid.add_column("planner")
    for heading in ("largest batch", "predicted peak", "predicted step ms", "images/s"):
        grid.add_column(heading, justify="right")
    grid.add_column("")
    for answer in answers:
        if answer.plan is None:
            grid.add_row(answer.planner, "none", "", "", "", escape("; ".join(answer.reason.split("; ")[:2])))
            continue
        ended = f"{answer.too_many} does not fit" if answer.too_many else "no more were tried"
        grid.add_row(
            answer.planner,
            str(answer.batch),
            format_bytes(answer.plan.predicted_peak_bytes),
            f"{1e3 * answer.plan.predicted_seconds:.1f}",
            f"{answer.images_per_second:.1f}",
            ended,
        )
    return grid
