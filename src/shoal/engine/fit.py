"""`shoal.fit`: the largest batch that trains inside a budget, found by planning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal import planners
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes
from shoal.engine.plans_by_batch import PlansByBatch, positive
from shoal.engine.pricing import Pricing
from shoal.engine.search.max_batch import MAX_IMAGES
from shoal.offload.policy import AUTO


@dataclass(frozen=True)
class Fit:
    """The largest batch that was found to train inside a budget.

    Attributes:
        batch: what `make_example` was given.
        plan: of that step; give it to `shoal.compile(model, plan=...)`, or compile with the same budget.
        too_many: the smallest batch that was tried and does not fit; 0 where every one fits that was tried.
    """

    batch: int
    plan: Plan
    too_many: int

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
        }

    def __str__(self) -> str:
        limit = f"{self.too_many} does not fit" if self.too_many else "no more were tried"
        return (
            f"{self.batch} images ({limit}): predicted peak {format_bytes(self.plan.predicted_peak_bytes)}, "
            f"step {1e3 * self.plan.predicted_seconds:.1f} ms, {self.images_per_second:.1f} images/s, "
            f"computed {self.plan.variant}"
        )


def fit(
    model: nn.Module,
    make_example: Callable[[int], torch.Tensor | Sequence[Any]],
    budget: int | str | None = None,
    *,
    first: int = 16,
    max_batch: int = MAX_IMAGES,
    hardware: str | Hardware | None = None,
    allow: str | Collection[str] | None = None,
    planner: str | planners.Planner = "joint",
    optimizer: torch.optim.Optimizer | str | None = None,
    offload_to: str | Path | None = AUTO,
    host_budget: int | str | None = None,
    lossy: str | Mapping[str, Any] | None = None,
    name: str | None = None,
    trying: Callable[[int], object] = lambda batch: None,
) -> Fit:
    """The largest batch that trains inside a budget.

    It replaces doubling the batch until training runs out of memory: steps are planned, and none is run. Doubles the
    batch until it no longer fits, then narrows down by what the planner says the least budget would be. Answers below
    200 are exact: the next one does not fit. Above, one that is 1 % larger does not.

    Args:
        model: the network.
        make_example: an int → the forward pass's argument at that size, or a tuple of its arguments. It may as well be
            the side of an image: whatever needs more bytes the larger it is. On the "meta" device it takes no memory.
            Where `hardware` is named it may be asked for up to 16 times the batch tried, never above `max_batch`: steps
            in between follow from those.
        budget: device bytes at the peak of the step, as for `shoal.plan`. None for SHOAL_BUDGET of the environment; one
            of the two must be there.
        first: the batch to begin with.
        max_batch: the batch to stop at.
        hardware, allow, planner, optimizer, offload_to, host_budget, lossy, name: as for `shoal.plan`.
        trying: called with each batch before it is planned.

    Returns:
        A `Fit`: `batch` and its `plan`.

    Raises:
        InputError: an argument is none of what is listed above, or the model takes no input that `make_example` made.
        CodecError: `lossy` names no codec for activations.
        BudgetError: not even a batch of one fits.
        CaptureError: the model is not one graph.

    Example:
        >>> import shoal
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
        >>> def images(batch):
        ...     return torch.empty(batch, 3, 32, 32, device="meta")
        >>> found = shoal.fit(model, images, "4MiB", hardware="p100-nvlink", allow="recompute")
        >>> found.batch, found.plan.predicted_peak_bytes <= 4 * 2**20
        (34, True)

    Known limits: it assumes that where a batch does not fit, no larger one does. A planner whose search is limited can
    miss a plan; then the answer is a batch that fits, not the largest.
    """
    first, max_batch = positive("first", first), positive("max_batch", max_batch)
    pricing = Pricing.of(
        model,
        budget,
        hardware=hardware,
        allow=allow,
        planner=planner,
        optimizer=optimizer,
        offload_to=offload_to,
        host_budget=host_budget,
        lossy=lossy,
        name=name,
    )
    plans = PlansByBatch(pricing, make_example, max_batch)
    batch, too_many = plans.largest(plans, trying, first)
    return Fit(batch, plans(batch), too_many)
