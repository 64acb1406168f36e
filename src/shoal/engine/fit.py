"""`shoal.fit`: the largest batch, or the largest patch, that trains inside a budget, found by planning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.capture.call_arguments import Example
from shoal.core import arguments
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.engine.options import Options
from shoal.engine.plan import required_budget
from shoal.engine.plans_by_batch import PlansByBatch, least_bytes
from shoal.engine.plans_by_patch import PlansByPatch
from shoal.engine.pricing import Pricing
from shoal.engine.search.max_batch import MAX_IMAGES
from shoal.engine.search.max_patch import Patch, check_divides, ladder, largest_patch, multiples, shown
from shoal.errors import InputError
from shoal.offload.policy import AUTO

_FIRST = 16  # images


@dataclass(frozen=True)
class Fit:
    """The largest batch or patch that was found to train inside a budget.

    Attributes:
        batch: what `make_example` was given; with `patch=`, the batch of what it made.
        plan: of that step; run it with `shoal.Options(plan=...)`, or compile with the same budget.
        too_many: the smallest batch that was tried and does not fit; 0 where every one fits that was tried.
        patch: with `patch=`, the largest patch; else ().
        too_large: with `patch=`, the smallest patch that was tried and does not fit; () where every one fits.
        multiple_of: with `patch=`, what each side is a multiple of.
    """

    batch: int
    plan: Plan
    too_many: int
    patch: Patch = ()
    too_large: Patch = ()
    multiple_of: Patch = ()

    @property
    def images_per_second(self) -> float:
        """Predicted."""
        return self.batch / self.plan.predicted_seconds

    def to_json(self) -> dict[str, Any]:
        """The figures as plain values, for `json.dump`."""
        return {
            "planner": self.plan.planner,
            "batch": self.batch,
            "too_many": self.too_many,
            "predicted_peak_bytes": self.plan.predicted_peak_bytes,
            "predicted_seconds": self.plan.predicted_seconds,
            "images_per_second": self.images_per_second,
            "variant": str(self.plan.variant),
            "patch": list(self.patch),
            "too_large": list(self.too_large),
            "multiple_of": list(self.multiple_of),
        }

    def __str__(self) -> str:
        if self.patch:
            limit = f"{shown(self.too_large)} does not fit" if self.too_large else "no larger one was tried"
            found = f"{shown(self.patch)}, {self.batch} at a time ({limit})"
        else:
            found = (
                f"{self.batch} images ({f'{self.too_many} does not fit' if self.too_many else 'no more were tried'})"
            )
        return (
            f"{found}: predicted peak {format_bytes(self.plan.predicted_peak_bytes)}, "
            f"step {1e3 * self.plan.predicted_seconds:.1f} ms, {self.images_per_second:.1f} images/s, "
            f"computed {self.plan.variant}"
        )


def fit(
    model: nn.Module,
    make_example: Callable[[Any], Example],
    budget: int | str | None = None,
    *,
    first: int = _FIRST,
    max_batch: int = MAX_IMAGES,
    patch: Sequence[int] | None = None,
    multiple_of: int | Sequence[int] | None = None,
    max_patch: Sequence[int] | None = None,
    hardware: str | Hardware | None = None,
    allow: str | Collection[str] | None = None,
    optimizer: torch.optim.Optimizer | str | None = None,
    offload_to: str | Path | None = AUTO,
    options: Options | None = None,
    name: str | None = None,
    trying: Callable[[Any], object] = lambda size: None,
) -> Fit:
    """The largest batch, or the largest patch, that trains inside a budget.

    It replaces doubling the batch until training runs out of memory: whether a step fits is found by planning, and none
    is run. Doubles the batch until it no longer fits, then narrows down by the smallest plans that are found in a
    moment. Only the answer is planned for speed. Answers below 200 are exact: the next one does not fit. Above, one
    that is 1 % larger does not.

    With `patch=` the batch stays and the patch grows, one side after the other, in steps that the network's strides
    divide: of the answer, no side can grow by its step.

    Args:
        model: the network.
        make_example: an int → what the model is called with at that size, as `example` of `shoal.plan`. It may as well
            be the side of an image: whatever needs more bytes the larger it is. On "meta" it takes no memory.
            Where `hardware` is named it may be asked for up to 16 times the batch tried, never above `max_batch`: steps
            in between follow from those. With `patch=` it is a patch → the same, such as
            `lambda patch: torch.empty(2, 1, *patch, device="meta")`.
        budget: device bytes at the peak of the step, as for `shoal.plan`. None for SHOAL_BUDGET of the environment; one
            of the two must be there.
        first: the batch to begin with.
        max_batch: the batch to stop at.
        patch: a patch to begin with, a size for each axis, such as (64, 128, 128). Its proportions are kept as far as
            steps allow.
        multiple_of: what a side has to be a multiple of, one number or one for each axis. None: found by the network's
            forward pass on the meta device.
        max_patch: sizes that no side goes beyond, such as the median shape of a data set, whose proportions are kept
            then. None for no limit.
        hardware, allow, optimizer, offload_to, options, name: as for `shoal.plan`.
        trying: called with each batch or patch before it is planned.

    Returns:
        A `Fit`: `batch`, or `patch`, and its `plan`.

    Raises:
        InputError: an argument is none of what is listed above, or the model takes no input that `make_example` made;
            `patch` is none that the strides divide: what would do is named.
        BudgetError: not even a batch of one fits, or the smallest patch that the network takes.
        CaptureError: the model is not one graph.

    Example:
        >>> import shoal
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
        >>> def images(batch):
        ...     return torch.empty(batch, 3, 32, 32, device="meta")
        >>> found = shoal.fit(model, images, "8MiB", hardware="p100-nvlink", allow="recompute")
        >>> found.batch, found.plan.predicted_peak_bytes <= 8 * 2**20
        (44, True)
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 1, 3, padding=1))
        >>> def volumes(patch):
        ...     return torch.empty(2, 1, *patch, device="meta")
        >>> how = dict(hardware="rtx-3060-12gb", allow="recompute", multiple_of=8)
        >>> found = shoal.fit(model, volumes, "4MiB", patch=(8, 16, 16), max_patch=(24, 99, 99), **how)
        >>> found.patch, found.too_large
        ((16, 48, 40), (16, 56, 40))

    Known limits: what the training loop holds is counted as in `shoal.plan`; in a loop that holds less, more may fit.
    It assumes that where a batch does not fit, no larger one does, and likewise for a patch with more voxels. A patch
    is captured again for each that is tried: seconds to a minute each for a large network. Of a step of hundreds of
    ops, only the variant that seems to need least is searched for a plan where none was found in a moment, and any
    search can miss a plan; then the answer is one that fits, not the largest.
    """
    first, max_batch = arguments.positive("first", first), arguments.positive("max_batch", max_batch)
    arguments.callback("trying", trying)
    if patch is None and (multiple_of is not None or max_patch is not None):
        raise InputError("multiple_of= and max_patch= are for the search of a patch; give patch= to begin with")
    if patch is not None and (first, max_batch) != (_FIRST, MAX_IMAGES):
        raise InputError("first= and max_batch= are for the search of a batch; leave them out with patch=")
    pricing = Pricing.of(
        model,
        budget,
        hardware=hardware,
        allow=allow,
        optimizer=optimizer,
        offload_to=offload_to,
        options=options,
        name=name,
    )
    if patch is not None:
        return _fit_patch(pricing, make_example, arguments.sizes("patch", patch), multiple_of, max_patch, trying)
    plans = PlansByBatch(pricing, make_example, max_batch)
    batch, too_many = plans.largest(trying, first)
    return Fit(batch, plans(batch), too_many)


def _fit_patch(
    pricing: Pricing,
    make_example: Callable[[Patch], Example],
    patch: Patch,
    multiple_of: int | Sequence[int] | None,
    max_patch: Sequence[int] | None,
    trying: Callable[[Patch], object],
) -> Fit:
    plans = PlansByPatch(pricing, make_example)
    budget_bytes = required_budget(pricing)
    dims = len(patch)
    most = None if max_patch is None else arguments.sizes("max_patch", max_patch, dims)
    if multiple_of is None:
        multiple = multiples(plans.why_not, patch)
    else:
        steps = (multiple_of,) * dims if isinstance(multiple_of, int) else multiple_of
        multiple = arguments.sizes("multiple_of", steps, dims)
    check_divides(patch, multiple, asked=multiple_of is not None)
    if most is not None:
        if any(side < step for side, step in zip(most, multiple, strict=True)):
            raise InputError(
                f"max_patch={most}: the network takes no patch below {shown(multiple)}; give at least that"
            )
        patch = tuple(min(side, limit // n * n) for side, limit, n in zip(patch, most, multiple, strict=True))
    smaller_first = ladder(patch, multiple, most, max(budget_bytes, prod(patch)))
    search = partial(
        largest_patch,
        steps=smaller_first,
        first=patch,
        multiple=multiple,
        most=most,
        fixed_bytes=least_bytes(pricing),
        budget_bytes=budget_bytes,
        trying=trying,
    )
    found = plans.largest(search, smaller_first[0])
    example = next((one for one in tree_leaves(plans.example(found.patch)) if isinstance(one, torch.Tensor)), None)
    batch = len(example) if example is not None and example.dim() else 1
    return Fit(batch, plans(found.patch), 0, found.patch, found.too_large or (), multiple)
